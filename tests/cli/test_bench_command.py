"""``umim bench``: a table and a verdict for people, one document for programs, typed errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import Umim, console
from umim_core.backbone.devices import fastest_dtype
from umim_core.cli.bench_command import _fitting
from umim_core.config.benchmark import BenchmarkConfig
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.errors import CorpusError

QUICK = (
    "--lengths",
    "64",
    "--new-tokens",
    "3",
    "--pairs",
    "1",
    "--warmup",
    "0",
    "-c",
    "umim-docs-llama",
)


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Return the value of the parameter, or None if it is not set. " * 60)
    return path


@pytest.mark.full
def test_a_table_and_a_verdict_are_printed(umim: Umim, text: Path) -> None:
    found = umim("bench", *QUICK, "--text", text, "--device", "cpu")
    assert found.code == 0, found.err
    for name in ("1 x 64", "pairs 50 %", "natural", "prefill", "decode", "request", "KV MiB"):
        assert name in found.out
    verdict = found.out.strip().splitlines()[-1]
    assert verdict.startswith(f"{fastest_dtype('cpu')}, merge prompt, raw tail 16. With 64 prompt")
    assert "measuring, settings: 0 of 2" in found.err


def test_the_document_holds_rows_break_even_and_verdict(umim: Umim, text: Path) -> None:
    options = ("--batch-sizes", "1,2", "--reductions", "0.25,0.5", "--device", "cpu", "--json")
    found = json.loads(umim("bench", *QUICK, *options, "--text", text).out)
    assert len(found["rows"]) == 2 * 3 * 3  # batch sizes, kinds of rules, phases
    assert {row["asked_reduction"] for row in found["rows"]} == {0.25, 0.5, None}
    assert {part["prompt_tokens"][0] for part in found["break_even"]} == {64}
    assert found["device"] == "cpu" and "batch size 1" in found["verdict"]


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        (None, (256, 512, 1024)),
        (1055, (256, 512, 1024)),
        (1054, (256, 512)),
        (512, (256,)),
        (64, (33,)),
    ],
)
def test_default_lengths_fit_the_positions(positions: int | None, lengths: tuple[int, ...]) -> None:
    config = BenchmarkConfig(prompt_lengths=(256, 512, 1024), new_tokens=32)
    assert _fitting(config, positions).prompt_lengths == lengths


def test_defaults_run_on_a_model_of_few_positions(umim: Umim, tiny_checkpoint: Path) -> None:
    options = ("--new-tokens", "3", "--pairs", "1", "--warmup", "0", "--json")
    called = ("bench", "-c", tiny_checkpoint, "--device", "cpu", *options)
    text = tiny_checkpoint.parent / "text.txt"
    text.write_text("w1 w2 w9 w3 w4 w5 " * 40)
    found = umim(*called, "--text", text)
    assert found.code == 0, found.err
    assert {row["prompt_tokens"] for row in json.loads(found.out)["rows"]} == {62}  # of 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "256,many"), "--lengths must be numbers with commas"),
        (("--lengths", "4"), "--lengths: Input should be greater than or equal to 8"),
        (("--batch-sizes", "0"), "--batch-sizes: Input should be greater than or equal to 1"),
        (("--reductions", "0.7"), "--reductions: Input should be less than or equal to 0.5"),
        (("--new-tokens", "1"), "--new-tokens: Input should be greater than or equal to 2"),
        (("--device", "abacus"), "device must be cpu"),
        (("--dtype", "int7"), "dtype must be one of"),
        (("--text", "missing.txt"), "--text must be a file of UTF-8 text"),
        (("--checkpoint", "no/such/checkpoint"), "umim: error"),
    ],
)
def test_bad_input_is_refused(umim: Umim, options: tuple[str, ...], message: str) -> None:
    found = umim("bench", *options)
    assert found.code == 1
    assert message in found.err


def test_too_short_a_text_is_refused(umim: Umim, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("A short text.")
    found = umim("bench", *QUICK, "--text", path, "--device", "cpu")
    assert found.code == 1
    assert "the text must hold 1 prompts of 64 tokens" in found.err


def test_the_default_text_is_that_of_held_out_modules(tmp_path: Path) -> None:
    modules = tmp_path / "transformers"
    modules.mkdir()
    for number in range(60):  # 4 % of the paths are held out
        line = f"Text number {number} " * 10
        (modules / f"m{number}.py").write_text(f'"""{line}"""\n')
    text = held_out_text(tmp_path)
    assert 0 < text.count("\n\n") + 1 < 15


def test_an_installation_without_sources_is_told_to_give_a_text(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="needs the docstrings of"):
        held_out_text(tmp_path)
