"""Device and data type of the commands that load a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import Umim, console
from umim_core import UMIM

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def double(tiny_checkpoint: Path) -> UMIM:
    return UMIM.from_pretrained(tiny_checkpoint, dtype="float64")


def test_generate_takes_a_data_type(umim: Umim, tiny_checkpoint: Path, double: UMIM) -> None:
    options = ("--max-new-tokens", 4, "--logprobs", 0, "--json", "--device", "cpu")
    found = umim("generate", TEXT, "-c", tiny_checkpoint, "--dtype", "float64", *options)
    assert found.code == 0, found.err
    expected = double.generate(TEXT, max_new_tokens=4, logprobs=0).logprobs
    assert expected is not None
    assert json.loads(found.out)["logprobs"] == pytest.approx(expected[0], rel=1e-12)


def test_ppl_takes_a_data_type(umim: Umim, tiny_checkpoint: Path, text: Path, double: UMIM) -> None:
    options = ("--dtype", "float64", "--device", "cpu", "--json")
    found = umim("ppl", text, "-c", tiny_checkpoint, *options)
    assert found.code == 0, found.err
    assert json.loads(found.out)["ppl_umim"] == pytest.approx(double.perplexity(TEXT), rel=1e-12)


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
