"""Special tokens that a tokenizer adds by default (a BOS) in prompts, scores and perplexity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.command_line import console, document
from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.text.token_ids import leading_ids

WORDS = ["<eos>", *(f"w{i}" for i in range(1, 31)), "<s>"]
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
def umim(
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> UMIM:
    tokenizer = with_template(word_tokenizer(WORDS), "<s> $A")
    tokenizer.chat_template = TEMPLATE
    backbone = wrap_backbone(tiny_model("llama", 0), tokenizer)
    return UMIM(backbone, Checkpoint.of(fresh_model(backbone, [(2, 3), (4, 5)], 0.2)))


@pytest.mark.parametrize(("switch", "added"), [(None, [BOS]), (True, [BOS]), (False, [])])
def test_a_prompt_is_encoded_as_the_tokenizer_does_by_default(
    umim: UMIM, switch: bool | None, added: list[int]
) -> None:
    output = umim.generate(TEXT, max_new_tokens=1, add_special_tokens=switch)
    assert list(output.prompt_ids[0]) == added + IDS
    assert list(umim.compress(TEXT, add_special_tokens=switch).ids) == added + IDS


def test_a_chat_has_the_special_tokens_of_its_template_only(umim: UMIM) -> None:
    chat = [{"role": "user", "content": TEXT}]
    for switch in (None, True):
        output = umim.generate(chat, max_new_tokens=1, add_special_tokens=switch)
        assert list(output.prompt_ids[0]) == [BOS, *IDS, 9]


def test_contexts_are_scored_behind_their_bos_and_continuations_have_none(umim: UMIM) -> None:
    table = umim.backbone.model(torch.tensor([[BOS, *IDS, 7]])).logits[0].log_softmax(-1)
    [[score]] = umim.score([TEXT], [["w7"]], merge="none")
    assert score == pytest.approx(float(table[-2, 7]), abs=1e-4)
    [[bare]] = umim.score([TEXT], [["w7"]], merge="none", add_special_tokens=False)
    assert bare != pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("merge", ["all", "none"])
def test_perplexity_of_a_text_is_that_of_its_ids_with_bos(umim: UMIM, merge: str) -> None:
    with_bos = umim.perplexity([torch.tensor([BOS, *IDS]).numpy()], merge=merge)
    bare = umim.perplexity([torch.tensor(IDS).numpy()], merge=merge)
    assert umim.perplexity(TEXT, merge=merge) == with_bos
    assert umim.perplexity(TEXT, merge=merge, add_special_tokens=False) == bare


@pytest.mark.parametrize(
    ("template", "leading"), [("<s> $A", [BOS]), ("<s> $A <eos>", [BOS]), ("$A <eos>", [])]
)
def test_leading_ids_are_what_a_tokenizer_puts_first(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    template: str,
    leading: list[int],
) -> None:
    assert leading_ids(with_template(word_tokenizer(WORDS), template)) == leading


@pytest.fixture(scope="module")
def checkpoint(umim: UMIM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("special")
    umim.backbone.model.save_pretrained(folder / "backbone")
    umim.backbone.require_tokenizer().save_pretrained(folder / "backbone")
    made = umim.checkpoint
    config = made.config.model_copy(update={"backbone": str(folder / "backbone")})
    Checkpoint(config, made.module, made.rules).save(folder / "checkpoint")
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("switch", "rows"),
    [
        ([], [[BOS, *range(k, k + 4)] for k in (1, 5)]),
        (["--no-special-tokens"], [[1, 2, 3, 4, 5], [5, 6, 7, 8]]),
    ],
)
def test_every_window_of_the_command_begins_with_the_bos(
    umim: UMIM,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    switch: list[str],
    rows: list[list[int]],
) -> None:
    (tmp_path / "text.txt").write_text(f"{TEXT} w5 w6 w7 w8", encoding="utf-8")
    options = ["-c", checkpoint, "--segment-length", 5, "--dtype", "float32", *switch]
    found = document(console(monkeypatch, capsys)("ppl", tmp_path / "text.txt", *options, "--json"))
    assert (found["windows"], found["targets"]) == (len(rows), sum(len(row) - 1 for row in rows))
    arrays = [torch.tensor(row).numpy() for row in rows]
    assert found["ppl_base"] == pytest.approx(umim.perplexity(arrays, merge="none"), rel=1e-5)
