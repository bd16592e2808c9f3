"""Mistakes of a first hour: messages say rule, value and remedy; notebooks show the spans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.command_line import console
from umim_core import UMIM
from umim_core.errors import GenerationError

TEXT = "w1 w2 w9 w3 w4 w5"


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
