"""``umim bench``: a table and a verdict for people, one document for programs, typed errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import Umim
from umim_core.backbone.devices import fastest_dtype
from umim_core.embedded.docstring_corpus import held_out_text

QUICK = ("--lengths", 64, "--new-tokens", 3, "--pairs", 1, "--warmup", 0, "-c", "umim-docs-llama")


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
    ("options", "message"),
    [
        (("--lengths", "256,many"), "--lengths must be numbers with commas"),
        (("--batch-sizes", "0"), "batch_sizes.0: Input should be greater than or equal to 1"),
    ],
)
def test_bad_input_is_refused(umim: Umim, options: tuple[str, ...], message: str) -> None:
    found = umim("bench", *options)
    assert found.code == 1
    assert message in found.err


def test_new_tokens_that_leave_no_room_for_a_prompt_are_refused(
    umim: Umim, tiny_checkpoint: Path
) -> None:
    found = umim("bench", "-c", tiny_checkpoint, "--new-tokens", 60, "--device", "cpu")
    assert found.code == 1
    assert "--new-tokens must leave a prompt 8 of the model's 64 positions; got 60" in found.err


def test_the_default_text_is_that_of_held_out_modules(tmp_path: Path) -> None:
    modules = tmp_path / "transformers"
    modules.mkdir()
    for number in range(60):  # 4 % of the paths are held out
        line = f"Text number {number} " * 10
        (modules / f"m{number}.py").write_text(f'"""{line}"""\n')
    text = held_out_text(tmp_path)
    assert 0 < text.count("\n\n") + 1 < 15
