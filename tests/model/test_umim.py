"""The public model: files, compression, streams, scores, perplexity, tokens that are added."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub.utils import httpx
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.tiny_models import tiny_model, word_tokenizer
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.errors import CheckpointError, ConfigError, EvaluationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.merging.merged_model import MergedModel
from umim_core.model.hub import upload_checkpoint
from umim_core.text.token_ids import leading_ids

WORDS = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


def test_what_is_saved_is_the_module_in_the_object(tiny_umim: UMIM, tmp_path: Path) -> None:
    trained = UMIM(tiny_umim.backbone, tiny_umim.checkpoint)
    with torch.no_grad():
        trained.module.linear_o.weight.add_(1.0)
    trained.save_pretrained(tmp_path / "checkpoint")
    loaded = UMIM.from_pretrained(tmp_path / "checkpoint", dtype="float32")
    assert torch.equal(loaded.module.linear_o.weight, trained.module.linear_o.weight)
    assert not torch.equal(loaded.module.linear_o.weight, tiny_umim.module.linear_o.weight)
    assert loaded.rules.digest == trained.rules.digest
    assert loaded.generate(WORDS, max_new_tokens=9) == trained.generate(WORDS, max_new_tokens=9)


def test_without_a_tokenizer_ids_are_generated_and_no_text(tiny_umim: UMIM) -> None:
    bare = wrap_backbone(tiny_umim.backbone.model, None)
    output = UMIM(bare, Checkpoint.of(fresh_model(bare, [(1, 2)]))).generate(
        [1, 2, 3], max_new_tokens=9
    )
    assert output.text == ("",) and output.ids[0]


def test_a_backbone_named_by_a_path_is_not_published(tiny_umim: UMIM) -> None:
    assert Path(tiny_umim.backbone.name).is_dir()
    with pytest.raises(CheckpointError, match="must name its backbone"):
        tiny_umim.push_to_hub("owner/name")


@pytest.mark.parametrize("error", [OSError("away"), httpx.ConnectError("away")])
def test_a_hub_that_is_away_is_one_typed_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", Mock(side_effect=error))
    directory = embedded_path("umim-docs-llama", "checkpoint")
    assert directory is not None
    with pytest.raises(CheckpointError, match="within reach; got 'owner/name': away"):
        upload_checkpoint(directory, "owner/name", False, "")


@pytest.mark.parametrize(
    ("raw_tail", "lengths"),
    [
        (0, (2, 1, 3, 4, 1)),
        (1, (2, 1, 3, 4, 1)),
        (2, (2, 1, 3, 1, 1, 1, 1, 1)),
        (9, (2, *[1] * 9)),
        (10, (1,) * 11),
        (99, (1,) * 11),
    ],
)
def test_the_units_of_a_prompt_are_those_of_its_compression(
    tiny_umim: UMIM, raw_tail: int, lengths: tuple[int, ...]
) -> None:
    compression = tiny_umim.compress(WORDS, raw_tail=raw_tail)
    assert compression.unit_lengths == lengths
    output = tiny_umim.generate(WORDS, max_new_tokens=1, raw_tail=raw_tail)
    assert output.prompt_spans == (compression.spans,)
    assert output.token_reduction == (compression.token_reduction,)
    assert output.cache_lengths == ((len(lengths),),)
    with pytest.raises(ConfigError, match="raw_tail must be an integer of at least 0; got -1"):
        tiny_umim.compress(WORDS, raw_tail=-1)


@pytest.mark.parametrize("raw_tail", [0, 4, 99])
def test_a_context_is_read_as_a_prompt_is(tiny_umim: UMIM, raw_tail: int) -> None:
    options = {"max_new_tokens": 1, "logprobs": tiny_umim.backbone.vocab_size}
    table = dict(tiny_umim.generate(WORDS, raw_tail=raw_tail, **options).top_logprobs[0][0])
    contexts = [WORDS, *(f"w{n} {WORDS}" for n in range(1, 17))]  # more than are read at once
    rows = tiny_umim.score(contexts, [["w4", "w5"]] * 17, raw_tail=raw_tail)
    found = rows[0]
    assert found == pytest.approx([table[4], table[5]], abs=1e-5) and len(rows) == 17
    for text, row in zip(contexts, rows, strict=True):
        [alone] = tiny_umim.score([text], [["w4", "w5"]], raw_tail=raw_tail)
        assert row == pytest.approx(alone, abs=1e-5)
    [base] = tiny_umim.score([WORDS], [["w4", "w5"]], merge="none")
    assert (found == pytest.approx(base, abs=1e-5)) == (raw_tail == 99)


VOCABULARY = ["<eos>", *(f"w{i}" for i in range(1, 31)), "<s>"]
BOS = 31
TEXT, IDS = "w1 w2 w3 w4", [1, 2, 3, 4]
TEMPLATE = (
    "<s> {% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("<eos>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def starting() -> UMIM:
    tokenizer = with_template(word_tokenizer(VOCABULARY), "<s> $A")
    tokenizer.chat_template = TEMPLATE
    backbone = wrap_backbone(tiny_model(), tokenizer)
    return UMIM(backbone, Checkpoint.of(fresh_model(backbone, [(2, 3), (4, 5)], 0.2)))


@pytest.mark.parametrize(("switch", "added"), [(None, [BOS]), (True, [BOS]), (False, [])])
def test_a_prompt_is_encoded_as_the_tokenizer_does_by_default(
    starting: UMIM, switch: bool | None, added: list[int]
) -> None:
    output = starting.generate(TEXT, max_new_tokens=1, add_special_tokens=switch)
    assert list(output.prompt_ids[0]) == added + IDS
    assert list(starting.compress(TEXT, add_special_tokens=switch).ids) == added + IDS


def test_a_chat_has_the_special_tokens_of_its_template_only(starting: UMIM) -> None:
    chat = [{"role": "user", "content": TEXT}]
    for switch in (None, True):
        output = starting.generate(chat, max_new_tokens=1, add_special_tokens=switch)
        assert list(output.prompt_ids[0]) == [BOS, *IDS, 9]


def test_contexts_are_scored_behind_their_bos_and_continuations_have_none(starting: UMIM) -> None:
    table = starting.backbone.model(torch.tensor([[BOS, *IDS, 7]])).logits[0].log_softmax(-1)
    [[score]] = starting.score([TEXT], [["w7"]], merge="none")
    assert score == pytest.approx(float(table[-2, 7]), abs=1e-4)
    [[bare]] = starting.score([TEXT], [["w7"]], merge="none", add_special_tokens=False)
    assert bare != pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("merge", ["all", "none"])
def test_perplexity_is_that_of_the_evaluation_and_a_text_has_its_bos(
    starting: UMIM, merge: str
) -> None:
    rows = [np.array([BOS, *IDS]), np.array([BOS, 5, 6, 2, 3])]
    matcher = starting.matcher if merge == "all" else None
    model = MergedModel(starting.backbone, starting.module, matcher)
    theirs = pytest.approx(perplexity(rows, model).ppl, rel=1e-5)
    assert starting.perplexity(rows, merge=merge) == theirs
    assert starting.perplexity([TEXT, "w5 w6 w2 w3"], merge=merge) == theirs
    bare = starting.perplexity([np.array(IDS)], merge=merge)
    assert starting.perplexity(torch.tensor([IDS]), merge=merge) == bare
    assert starting.perplexity(TEXT, merge=merge, add_special_tokens=False) == bare


@pytest.mark.parametrize(
    ("template", "leading"), [("<s> $A", [BOS]), ("<s> $A <eos>", [BOS]), ("$A <eos>", [])]
)
def test_leading_ids_are_what_a_tokenizer_puts_first(template: str, leading: list[int]) -> None:
    assert leading_ids(with_template(word_tokenizer(VOCABULARY), template)) == leading


PROMPT = "Return the sum of the array elements over a given axis. The default is to"


@pytest.fixture(scope="module")
def umim() -> UMIM:
    return UMIM.from_pretrained("umim-docs-gpt2", dtype="float32")


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 3}, {"merge": "none"}, {"raw_tail": 2}]
)
def test_streamed_pieces_are_the_generated_text_as_it_comes(
    umim: UMIM, options: dict[str, object]
) -> None:
    expected = umim.generate(PROMPT, max_new_tokens=24, **options)
    steps, pieces, output = list[int](), list[str](), None
    observed = {"observer": lambda _: steps.append(1), "max_new_tokens": 24}
    stream = umim.stream(PROMPT, **observed, **options)
    while output is None:
        try:
            pieces.append(next(stream))
            assert len(pieces) > 1 or len(steps) < 6  # it comes before the text is complete
        except StopIteration as end:
            output = end.value
    assert output == expected
    assert "".join(pieces) == expected.text[0] and len(pieces) > 5


def test_a_base_score_is_the_sum_of_the_models_log_probabilities(umim: UMIM) -> None:
    context, ending = umim.backbone.encode(PROMPT), umim.backbone.encode(" use the sum of")
    table = umim.backbone.model(torch.tensor([context + ending])).logits[0].log_softmax(dim=-1)
    rows = np.arange(len(context) - 1, len(context) + len(ending) - 1)
    expected = float(table[torch.from_numpy(rows), torch.tensor(ending)].sum())
    [[score]] = umim.score([PROMPT], [[" use the sum of"]], merge="none")
    assert score == pytest.approx(expected, abs=1e-4) and math.isfinite(score)
    assert umim.score([PROMPT], [[" use the sum of"]])[0][0] != pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
    ("contexts", "endings"),
    [
        *((["a"], []), ([""], [["b"]]), (["a"], [[""]]), (["a"], [[]])),
        *(("a", [["b"]]), (["a"], "b"), (["a"], ["b"]), (None, None), (["a"], None), (["a"], [5])),
    ],
)
def test_scores_without_tokens_or_lists_are_refused(
    umim: UMIM, contexts: list[str], endings: list[list[str]]
) -> None:
    with pytest.raises(EvaluationError):
        umim.score(contexts, endings)


def test_models_of_one_checkpoint_share_no_module(umim: UMIM) -> None:
    expected = umim.generate(PROMPT, max_new_tokens=6)
    wide = UMIM.from_pretrained("umim-docs-gpt2", dtype="float64")
    UMIM(wide.backbone, umim.checkpoint)
    assert umim.generate(PROMPT, max_new_tokens=6) == expected


def test_a_bfloat16_backbone_generates() -> None:
    umim = UMIM.from_pretrained("umim-docs-llama", dtype="bfloat16")
    output = umim.generate([PROMPT, "Return"], max_new_tokens=6, logprobs=1, merge="all")
    assert output.prompt_spans[0] and all(len(ids) == 6 for ids in output.ids)
