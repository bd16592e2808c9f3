"""Mistakes of a first hour: messages say rule, value and remedy; notebooks show the spans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.command_line import console
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError, TokenizerMismatchError

TEXT = "w1 w2 w9 w3 w4 w5"


def test_beam_search_is_refused_by_name(tiny_umim: UMIM) -> None:
    with pytest.raises(GenerationError, match="beam search is not supported; got num_beams"):
        tiny_umim.generate(TEXT, num_beams=4)
    with pytest.raises(TypeError, match="unknown options"):
        tiny_umim.generate(TEXT, beams=4)


def test_a_missing_chat_template_is_named(tiny_umim: UMIM) -> None:
    with pytest.raises(GenerationError, match="with a chat template; got one without"):
        tiny_umim.generate([{"role": "user", "content": "w1"}])


def test_padding_without_a_mask_is_warned_of(
    tiny_umim: UMIM, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([[1, 2, 9, 3], [0, 0, 4, 5]])  # <pad> is id 0
    tiny_umim.generate(ids, max_new_tokens=1)
    assert "rows [1] begin or end with the padding token 0" in caplog.text
    caplog.clear()
    tiny_umim.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=1)
    tiny_umim.generate({"input_ids": ids, "attention_mask": (ids != 0).long()}, max_new_tokens=1)
    tiny_umim.generate(ids[1], max_new_tokens=1)
    tiny_umim.generate([np.array([1, 2]), np.array([3])], max_new_tokens=1)
    assert caplog.messages == []


def test_a_tokenizer_mismatch_names_both(
    tiny_llama: Backbone, tiny_checkpoint: Path, word_tokenizer: object
) -> None:
    other = word_tokenizer(["<eos>", *(f"v{i}" for i in range(1, 32))])  # type: ignore[operator]
    strange = wrap_backbone(tiny_llama.model, other, name="strange")
    message = r"must be that of .*backbone \(\w{12}\); got one of strange, 32 entries \(\w{12}\)"
    with pytest.raises(TokenizerMismatchError, match=message):
        Checkpoint.load(tiny_checkpoint).check_vocabulary(strange)


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [
        ("--dtype", "float8", 1, "dtype must be one of auto, published, bfloat16"),
        ("--raw-tail", "-3", 1, "raw_tail must be an integer of at least 0"),
        ("--budget", "-1", 2, "--budget"),
        ("--target-tr", "0.8", 2, "--target-tr"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench", "ppl"])
def test_bad_options_are_refused_before_anything_is_loaded(
    command: str,
    option: str,
    value: str,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(UMIM, "from_pretrained", loaded)
    monkeypatch.setattr("umim_core.checkpoint.checkpoint_files.default_checkpoint", loaded)
    given = () if command == "bench" else (TEXT,)
    found = console(monkeypatch, capsys)(command, *given, option, value)
    assert (found.code, message in found.err) == (code, True), found.err
