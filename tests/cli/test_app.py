from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from support.command_line import Umim, document
from umim_core.baselines.registry import BASELINES
from umim_core.cli.app import app
from umim_core.embedded.assets import embedded_names, embedded_path

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"
UNITS = [2, 1, 3, 4, 1]


def test_compress_prints_units_and_figures(umim: Umim, tiny_checkpoint: Path) -> None:
    found = document(umim("compress", TEXT, "-c", tiny_checkpoint, "--json"))
    assert found["unit_lengths"] == UNITS
    assert found["spans"] == [[0, 2], [3, 3], [6, 4]]
    assert found["units"] == ["w1 w2", " w9", " w3 w4 w5", " w6 w7 w8 w9", " w1"]
    assert (found["tokens"], found["token_reduction"]) == (11, pytest.approx(6 / 11))


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_compress_reads_stdin_and_shows_the_text(
    umim: Umim, tiny_checkpoint: Path, arguments: list[str]
) -> None:
    result = umim("compress", *arguments, "-c", tiny_checkpoint, stdin=TEXT.encode())
    assert result.code == 0
    assert "11 tokens -> 5 units, 3 merged spans, token reduction 54.5%" in result.out


@pytest.mark.parametrize("name", embedded_names())
def test_path_prints_a_directory(umim: Umim, name: str) -> None:
    result = umim("path", name, "--part", "backbone")
    assert (result.code, result.out) == (0, f"{embedded_path(name, 'backbone')}\n")
    assert Path(result.out.strip(), "model.safetensors").is_file()
    found = document(umim("path", name, "--part", "backbone", "--json"))
    assert found == {"name": name, "part": "backbone", "path": result.out.strip()}


def test_path_prints_the_folder_of_tasks(umim: Umim) -> None:
    (task,) = Path(umim("path", "--tasks").out.strip()).glob("umim_docstrings.yaml")
    assert document(umim("path", "--tasks", "--json")) == {"tasks": str(task.parent)}


def test_all_baselines_are_listed_with_what_they_save(umim: Umim) -> None:
    found = document(umim("baselines", "--json"))["baselines"]
    assert [one["name"] for one in found] == list(BASELINES)
    sides = {one["name"]: one["side"] for one in found}
    assert (sides["truncation"], sides["full-cache"]) == ("prompt", "cache")
    lines = umim("baselines").out.splitlines()
    assert [line.split()[:2] for line in lines] == [[one["name"], one["side"]] for one in found]


CHECKPOINT = ("-c", "CHECKPOINT")
ERRORS = {
    "compress: checkpoint": (("compress", "x", "-c", "no-such"), "a checkpoint must be one of"),
    "compress: surrogate": (("compress", "a\udcff", *CHECKPOINT), "a text must be UTF-8"),
    "ppl: dtype": (("ppl", "a.txt", "-c", "no-such", "--dtype", "float8"), "dtype must be one of"),
    "generate: raw tail": (
        ("generate", "w1", "-c", "no-such", "--raw-tail", "-3"),
        "raw_tail must be an integer of at least 0",
    ),
    "ppl: device": (("ppl", "a.txt", *CHECKPOINT, "--device", "cuda:99"), "device must be cpu"),
    "ppl: halves": (
        ("ppl", "a.txt", *CHECKPOINT, "--prompt", "--segment-length", "8", "--context", "5"),
        "--context must be at most 4 with --prompt",
    ),
    "path: climb": (("path", "umim-docs-llama/.."), "a name must be one of"),
    "path: tasks": (("path", "umim-docs-llama", "--tasks"), "NAME has no part in --tasks; got"),
    "generate: seed": (("generate", "w1", *CHECKPOINT, "--greedy", "--seed", "1"), "got ['seed']"),
    "generate: budget": (
        ("generate", "w1", "-c", "no-such", "--merge", "none", "--budget", "1"),
        "--budget and --target-tr choose what merges; got --budget 1.0. Leave them out.",
    ),
    "generate: target": (("generate", "w1", "-c", "no-such", "--target-tr", "1"), "below 0.9"),
    "generate: special tokens": (
        ("generate", "w1", "-c", "no-such", "--chat", "--special-tokens"),
        "a chat has the special tokens of its template; got",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in (("a", TEXT), ("none", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ERRORS)
def test_a_broken_rule_is_told_and_leaves_nothing(
    umim: Umim, tiny_checkpoint: Path, folder: Path, name: str
) -> None:
    arguments, message = ERRORS[name]
    before = sorted(folder.rglob("*"))
    result = umim(*(str(tiny_checkpoint) if a == "CHECKPOINT" else a for a in arguments), "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("umim: error: ")
    assert message in result.err
    assert sorted(folder.rglob("*")) == before


def test_every_command_helps_and_no_word_is_taken_for_markup(umim: Umim) -> None:
    """Rich leaves out what stands in brackets, a default say."""
    commands = get_command(app).commands
    assert len(commands) == 18
    for name, command in commands.items():
        assert umim(name, "--help").code == 0
        texts = [command.help, *(getattr(option, "help", None) for option in command.params)]
        assert not [text for text in texts if text and "[" in text]


@pytest.mark.parametrize("command", ["compress", "generate"])
@pytest.mark.parametrize(
    ("stdin", "message"),
    [(None, "a text must be given; got nothing"), (b"\xff", "stdin must be UTF-8")],
)
def test_unusable_stdin_is_told_before_a_model_is_loaded(
    umim: Umim, command: str, stdin: bytes | None, message: str
) -> None:
    result = umim(command, "-c", "no-such", stdin=stdin)
    assert (result.code, result.out) == (1, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--merge", "some"], "'some' is not one of 'all', 'prompt', 'none'"),
        (["ppl"], "Missing argument"),
        (["train", "m", "x", "--steps", "0"], "Invalid value for '--steps'"),
        (["bench", "--budget", "-1"], "Invalid value for '--budget'"),
        (["rules", "x", "--top", "-1"], "Invalid value for '--top'"),
        (["mime"], "No such command 'mime'"),
    ],
)
def test_wrong_usage_is_told(umim: Umim, arguments: list[str], message: str) -> None:
    result = umim(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.replace("│", " ").split())
