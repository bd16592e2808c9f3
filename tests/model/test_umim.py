"""The public model: loading and refusals, generation, raw tails, compression, perplexity, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.merged_models import fresh_model
from support.tiny_models import (
    letter_tokenizer,
    random_model,
    tiny_config,
    written_by_transformers,
)
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError, ConfigError, GenerationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.merging.merged_model import MergedModel

LETTERS = "abcdefghijklmnopqrstuvwxyz <>&"
TEXT = "abc <b>abcd&"


def make_backbone(folder: Path, seed: int = 0, letters: str = LETTERS) -> str:
    config = tiny_config(
        vocab_size=len(letters) + 2, initializer_range=0.3, eos_token_id=len(letters) + 1
    )
    # Published in bfloat16, as real backbones are.
    random_model(config, seed).to(torch.bfloat16).save_pretrained(folder)
    letter_tokenizer(letters).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(make_backbone(tmp_path_factory.mktemp("backbone")))


@pytest.fixture(scope="module")
def umim(backbone: Backbone) -> UMIM:
    rules = [tuple(backbone.encode(span)) for span in ("ab", "abc", "bcd", "<b", " <")]
    rules += [(a, b) for a in range(26) for b in range(0, 26, 2) if a != 0]
    return UMIM(backbone, Checkpoint.of(fresh_model(backbone, rules)).recommending("all"))


def test_a_saved_model_loads_and_generates_the_same(umim: UMIM, tmp_path: Path) -> None:
    umim.save_pretrained(tmp_path / "checkpoint")
    loaded = UMIM.from_pretrained(tmp_path / "checkpoint", dtype="float32")
    assert loaded.generate(TEXT, max_new_tokens=9) == umim.generate(TEXT, max_new_tokens=9)
    assert loaded.rules.digest == umim.rules.digest


def test_what_is_saved_is_the_module_in_the_object(
    backbone: Backbone, umim: UMIM, tmp_path: Path
) -> None:
    trained = UMIM(backbone, umim.checkpoint)
    with torch.no_grad():
        trained.module.linear_o.weight.add_(1.0)
    trained.save_pretrained(tmp_path / "checkpoint")
    loaded = UMIM.from_pretrained(tmp_path / "checkpoint", dtype="float32")
    assert torch.equal(loaded.module.linear_o.weight, trained.module.linear_o.weight)
    assert not torch.equal(loaded.module.linear_o.weight, umim.module.linear_o.weight)


def test_merge_none_is_the_base_model(umim: UMIM) -> None:
    output = umim.generate(TEXT, max_new_tokens=12, merge="none")
    ids = umim.backbone.encode(TEXT)
    theirs = written_by_transformers(umim.backbone.model, ids, 12, do_sample=False)
    assert list(output.ids[0]) == theirs
    assert (output.token_reduction, output.gen_kv_reduction) == ((0.0,), (0.0,))


def test_without_a_tokenizer_ids_are_generated_and_no_text(backbone: Backbone, umim: UMIM) -> None:
    bare = wrap_backbone(backbone.model, None)
    rules = [tuple(backbone.encode("abc"))]
    output = UMIM(bare, Checkpoint.of(fresh_model(bare, rules))).generate(
        [0, 1, 2, 3], max_new_tokens=9
    )
    assert (output.text, len(output.ids[0])) == (("",), 9)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "at least one token id"),
        ([], {}, "at least one prompt"),
        ("a", {"max_new_tokens": 65}, "64 positions"),
    ],
)
def test_bad_requests_are_refused(
    umim: UMIM, prompt: str | list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises((ConfigError, GenerationError), match=message):
        umim.generate(prompt, **options)


@pytest.mark.parametrize("merge", ["all", "none"])
def test_perplexity_is_that_of_the_evaluation(umim: UMIM, merge: str) -> None:
    texts = [TEXT, "hello world"]
    rows = [np.array(umim.backbone.encode(text)) for text in texts]
    matcher = umim.matcher if merge == "all" else None
    theirs = perplexity(rows, MergedModel(umim.backbone, umim.module, matcher, "compact"))
    assert umim.perplexity(texts, merge=merge) == pytest.approx(theirs.ppl, rel=1e-5)
    assert umim.perplexity(rows, merge=merge) == pytest.approx(theirs.ppl, rel=1e-5)


def test_a_backbone_named_by_a_path_is_not_published(umim: UMIM) -> None:
    assert Path(umim.backbone.name).is_dir()
    with pytest.raises(CheckpointError, match="must name its backbone"):
        umim.push_to_hub("owner/name")


WORDS = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


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


def test_a_negative_raw_tail_is_refused(tiny_umim: UMIM) -> None:
    for use in (tiny_umim.compress, tiny_umim.generate):
        with pytest.raises(ConfigError, match="raw_tail must be an integer of at least 0; got -1"):
            use(WORDS, raw_tail=-1)


@pytest.mark.parametrize("raw_tail", [0, 4, 99])
def test_a_context_is_read_as_a_prompt_is(tiny_umim: UMIM, raw_tail: int) -> None:
    options = {"max_new_tokens": 1, "logprobs": tiny_umim.backbone.vocab_size}
    table = dict(tiny_umim.generate(WORDS, raw_tail=raw_tail, **options).top_logprobs[0][0])
    [found] = tiny_umim.score([WORDS], [["w4", "w5"]], raw_tail=raw_tail)
    assert found == pytest.approx([table[4], table[5]], abs=1e-5)
    [base] = tiny_umim.score([WORDS], [["w4", "w5"]], merge="none")
    assert (found == pytest.approx(base, abs=1e-5)) == (raw_tail == 99)
