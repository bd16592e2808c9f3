"""Output that the terminal cannot write as it is, or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from umim_core.cli.app import main

TEXT = "Return the sum — 日本語 🙂 Привет"
NAME = "umim-docs-llama"
FEW = ("--max-new-tokens", "3")
COMMANDS = {
    "help": ("--help",),
    "help of a command": ("mine", "--help"),
    "version": ("--version",),
    "compress": ("compress", TEXT, "-c", NAME),
    "compress as JSON": ("compress", TEXT, "-c", NAME, "--json"),
    "generate": ("generate", TEXT, "-c", NAME, *FEW),
    "generate, shown": ("generate", TEXT, "-c", NAME, "--show", *FEW),
    "generate, streamed": ("generate", TEXT, "-c", NAME, "--stream", *FEW),
    "rules": ("rules", NAME),
    "path": ("path",),
    "baselines": ("baselines",),
    "task-text": ("task-text", "--help"),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["umim", *COMMANDS[request.param]])
    return str(request.param)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_terminal_encoding_takes_the_output(
    command: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding=encoding) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    written = path.read_text(encoding)
    assert written.isascii() or encoding == "cp1252"
    if command in ("compress", "generate, shown"):
        assert "\\u65e5" in written.replace("[", "").replace("]", "").replace("\n", "")


@pytest.mark.parametrize(
    ("closed", "reason"), [(False, "No space left on device"), (True, "Bad file descriptor")]
)
def test_a_stdout_that_takes_nothing_is_one_line(
    command: str,
    closed: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("/dev/full").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None if closed else stdout)  # as Python does for ``>&-``
        with pytest.raises(SystemExit) as end:
            main()
        sys.stdout.close()
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"umim: error: stdout must take the output; got {reason}"


def test_a_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from umim_core.cli.app import main; main()", "rules", NAME],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(said.splitlines()) <= 1 and "Traceback" not in said
