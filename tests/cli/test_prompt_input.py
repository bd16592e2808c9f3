"""Device and data type of the commands that load a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import Umim

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("command", ["generate", "ppl"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "abacus", "device must be cpu"),
        ("--device", "cuda:99", "device must be cpu"),
        ("--device", "meta", "device must be cpu"),
        ("--dtype", "int7", "dtype must be one of"),
    ],
)
def test_what_is_not_there_is_refused(
    umim: Umim, tiny_checkpoint: Path, text: Path, command: str, option: str, value: str,
    message: str,
) -> None:  # fmt: skip
    found = umim(command, text, "-c", tiny_checkpoint, option, value)
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("umim: error: ") and f"; got {value}" in found.err
    assert message in found.err
