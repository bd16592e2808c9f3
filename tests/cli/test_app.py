"""The command line as a whole: help, what it imports, refusals, and stdouts of every kind."""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from support.command_line import Umim
from support.processes import output_of
from umim_core.cli.app import app, main
from umim_core.cli.console_output import telling

MINE = "mine a.txt --tokenizer tokenizer --out new"
PRUNE = "prune checkpoint a.txt --out new"
TRAIN = "train model a.txt --rules rules"
SERVE = "serve --port 0"
GATEWAY = f"{SERVE} --upstream http://127.0.0.1:1"
# What a command says of a broken rule; each rule of the library stands once, at its owner.
REFUSED = {
    "compress x -c no-such": "a checkpoint must be one of",
    f"{GATEWAY} --export model": "that umim export wrote; got model. Write one: umim export",
    **{
        f"{line} {name}": said
        for line in (
            *("compress x -c", "export --out new", SERVE, f"{SERVE} --base"),
            *("rules rules --tokenizer", "report a.txt --tokenizer"),
        )
        for name, said in {
            "./none.gguf": " that is named by its path must exist; got './none.gguf', a path that",
            "none/none.gguf": "download a hub repository of such a name, and name its folder.",
            "old/none": "Check the path: old holds no none.",
        }.items()
    },
    "mine ./none --kind dataset --tokenizer tokenizer --out new": "must exist; got './none'",
    "compress a\udcff -c checkpoint": "a text must be UTF-8",
    "generate w1 -c checkpoint --greedy --seed 1": "need --sample; got ['seed']",
    "generate w1 --sample --top-p nan": "--top-p is out of range: it must be a number; got nan",
    "generate w1 -n 2": "need sampling; got n (num_return_sequences) 2. Add --sample, or",
    "generate w1 --stream --sample -n 2": "--samples cannot be streamed; got --samples 2",
    "generate w1 --show": "--json, which prints one document; got --show True",
    "generate w1 --stream": "--json, which prints one document; got --stream True",
    "generate w1 --system w5": "--role need --chat; got --system w5. Leave it out.",
    "generate w1 --chat --tools raw_tail": "error: raw_tail: the file must be readable",
    "generate w1 --role user": "--role need --chat; got --role ['user']",
    "generate w1 --merge none --budget 1": "--budget and --target-tr choose what merges; got --b",
    "ppl a.txt -c checkpoint --segment-length 16 --device cuda:99": "device must be cpu",
    "ppl a.txt -c checkpoint --prompt --segment-length 8 --context 5": "must be at most 4 with --p",
    "ppl a.txt -c checkpoint --segment-length 8 --context 8": "--context must lie between 0 and 7",
    "ppl one.txt -c checkpoint": "at least two tokens of a document",
    "ppl one.txt -c checkpoint --device cuda:99": "at least two tokens of a document",
    "ppl a.txt -c checkpoint --segment-length 66": "windows must fit the 64 positions of ",
    "fetch nope": "must be one of smollm2-135m-instruct; got nope. `umim fetch` lists them.",
    "ppl nosuch -c absent": "a corpus file must exist; got nosuch. Check the path; a data set of",
    "bench --lengths 256,many": "error: --lengths must be an integer; got many",
    "bench --batch-sizes 0": "error: --batch-sizes must be at least 1; got 0",
    "bench -c checkpoint --lengths 99": "new tokens must fit the backbone's 64 positions",
    "bench -c checkpoint --new-tokens 60 --device cpu": "a prompt 8 of the model's 64 positions; g",
    "path umim-docs-llama/..": "a name must be one of",
    "path nowhere --part backbone": "Other models are named by directory, .gguf file or hub rep",
    "path umim-smollm2-135m --part backbone": "It is a checkpoint, of the backbone smollm2-135m",
    "path umim-docs-llama --tasks": "NAME must be left out with --tasks; got NAME umim-docs-llama",
    "path --tasks --part backbone": "--part must be left out with --tasks; got --part backbone",
    "init model": "--rules must be a rule directory; got nothing. Make one: umim mine",
    "init absent --rules rules --out rules/new": "an output directory must not lie in another res",
    "train model a.txt --rules rules --steps 1 --out rules/new": "rules/new. Choose a place ",
    **{
        f"{line} --out a.txt": "the output directory must not exist; got "
        for line in ("init absent --rules rules", "train absent a.txt --rules rules")
    },
    "compress x -c ''": "must not be empty; got ''",
    "import absent --backbone model --out old": "the output directory must not exist",
    "train absent a.txt --rules rules --out old": "the output directory must not exist",
    "tune absent a.txt --out old": "the output directory must not exist",
    **{
        f"{line} loop": "a file must be within reach; got Symlink loop from '"
        for line in ("compress x --html loop/x -c", f"{MINE} --out", f"{TRAIN} --out")
    },
    **{
        f"{line} a.txt": "the output file must not exist; got a.txt"
        for line in (
            *("task-text umim_ruler_1k --tokenizer x --out", "compress x -c absent --html"),
            *("generate x -c absent --html", "report a.txt --tokenizer absent --html"),
        )
    },
    f"{MINE} --out old": "the output directory must not exist; got old",
    "mine a.txt --out new": "text needs a tokenizer; got none",
    f"{MINE} --backbone x": "--backbone must come with --policy confidence; got --backbone x",
    f"{MINE} --policy confidence": "--tokenizer must be left out with --policy confidence: the ba",
    MINE.replace("a.txt", "empty.txt"): "non-empty document; got empty.txt. Check the names",
    f"{MINE} --tau 0": "error: --tau must be at least 1; got 0",
    "rules no-such": "rules must be a rule directory, a checkpoint or one of umim-docs-",
    "rules a.txt": "got a.txt, a file. Check the name, or make rules of texts: umim mine TEXTS --",
    "rules tokenizer": "umim-smollm2-135m-inside; got tokenizer. Check the name",
    "rules rules --scan": "a scan needs a tokenizer to read the rules",
    f"{PRUNE} --keep-all --decode-tr 0.1 --decode-max-damage 1": "need one bound",
    f"{PRUNE} --target-tr 0.1 --decode-tr 0.2": "by rules that stay; got --target-tr 0.1, --decode",
    f"{PRUNE} --target-tr 0.1 --decode-tr nan": "reduction must lie above 0 and below 0.9375; got",
    f"{PRUNE} --target-tr 0.1 --keep-all": "not both; got --target-tr 0.1,",
    f"{PRUNE} --target-tr 0.1 --out .": "the output directory must not exist",
    "prune absent none.txt --keep-all --out old": "the output directory must not exist; got ",
    f"{PRUNE} --keep-all --damage rules": "--damage must be a damage table, the folder 'damage' th",
    f"{PRUNE} --target-tr 0.1 --keep-digits --device cuda:99 --limit 9": "one held out; got [9] to",
    f"{PRUNE} --target-tr 0.1 --keep-digits --heldout ids.npy": "the tokenizer's vocabulary",
    "prune absent a.txt --keep-all --out new --heldout none.txt": "file must exist; got none.txt",
    f"{TRAIN} --segment-length 16 --unit-positions preserved --merge-depth 99": (
        "error: --merge-depth must be below 2, the layers of the model; got 99"
    ),
    "train model a.txt --rules nowhere --out new": "--rules must be a rule directory; got nowhere",
    "train model a.txt --rules rules --out new --split test": "of the kinds dataset; got test for",
    f"{TRAIN} --out new --segment-length 65": (
        "at most 64 tokens, the positions of model; got 65. Lower --segment-length."
    ),
    "tune model a.txt --out new --max-tokens 65": "of model; got 65. Lower --max-tokens.",
    "export checkpoint --out new --field text": "options of a corpus need one; got --field",
    "export checkpoint --out new --tau 3": "whose spans are chosen; got --tau 3. Leave it out.",
    **{
        f"{line} --out a.txt/x": "must be writable"
        for line in (
            *("init absent --rules rules", "import absent --backbone model", "export absent"),
            *("train absent a.txt --rules rules", "prune absent a.txt --keep-all"),
        )
    },
    "prune absent a.txt --keep-all --out /sys/absent/x": "must be writable",
    "task-text umim_ruler_1k --tokenizer absent --out a.txt/x": "a.txt/x (0 bytes) must be writ",
    **{
        f"{line} --html a.txt/x": "a.txt/x (0 bytes) must be writable"
        for line in ("compress x -c absent", "generate x -c absent", "report absent --tokenizer x")
    },
    "bench --text old": "--text must be a readable file of UTF-8 text; got",
    "serve --chat-template nowhere": "--chat-template must be a readable file of UTF-8 text; got",
    "serve --chat-template a.txt": "must be a Jinja template, which reads messages; got a.txt",
    **{
        f"{line} {'n' * 300}": "a file must be within reach; got "
        for line in (
            *("compress x -c", "rules", "export --out new", "serve", "init model --rules"),
            *("import --backbone model", "import old --backbone", "train model a.txt --rules"),
        )
    },
    "serve --host 0.0.0.0": "needs a token",
    "serve no-such --host a..b --api-key-env HOME": "able to listen on --host and --port; got a..b",
    "serve --api-key-env UMIM_NOT_SET": "must name a variable that is set",
    "serve --api-key-env UMIM_TWO_LINES": "must name a variable that is set, to one line",
    f"{GATEWAY} --report-cached-tokens": "got --report-cached-tokens True.",
    f"{GATEWAY} --export x m": "--upstream merges by",
    f"{GATEWAY} --export x --base": "and runs none; got --export x, checkpoint None, --base True",
    f"{GATEWAY} --export none --upstream-key-env UMIM_NOT_SET": "--upstream-key-env must name a ",
    f"{SERVE} --upstream 127.0.0.1 --export none": "an upstream must be the address of a server",
    f"{GATEWAY} --max-rows 16": "got --max-rows 16.",
    f"{GATEWAY} --export old": "--export must be a directory that umim export wrote; got old. Writ",
    f"{SERVE} umim-docs-llama --base --merge all": "merges nothing",
    f"{SERVE} umim-docs-lama": "umim-docs-lama",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_broken_rule_is_told_and_leaves_nothing(
    umim: Umim, workplace: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (workplace / "old").mkdir()
    (workplace / "loop").symlink_to("loop")
    (workplace / "one.txt").write_text("w1")
    (workplace / "empty.txt").write_text("")
    np.save("ids.npy", np.full(1024, 5000, dtype=np.uint16))
    monkeypatch.setenv("UMIM_TWO_LINES", "secret\nsecret")
    before = sorted(workplace.rglob("*"))
    result = umim(*shlex.split(line), *([] if line.startswith("serve") else ["--json"]))
    assert (result.code, result.out) == (1, "")
    (told,) = result.err.splitlines()
    assert told.startswith("umim: error: ") and REFUSED[line] in told and "secret" not in told
    assert sorted(workplace.rglob("*")) == before


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(umim: Umim) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = umim("serve", "no-such-model", "--port", port)
    assert (result.code, result.out) == (1, "")
    assert f"listen on --host and --port; got 127.0.0.1:{port}" in result.err


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
    ("line", "message"),
    [
        ("generate x --merge some", "'--merge': 'some' is not one of 'all', 'prompt', 'none'"),
        ("generate x --raw-tail -3", "'--raw-tail': it must be at least 0; got -3"),
        ("generate x --budget nan", "'--budget': it must be a number; got nan"),
        ("ppl", "Missing argument"),
        ("mine ids.npy", "Missing option '--out'"),
        *(
            (f"{name} model a.txt --seed {10**20}", "'--seed': it must be at most 2147483647")
            for name in ("train", "tune")
        ),
        ("report x --tokenizer y --html .", "Invalid value for '--html': file '.' is a directory"),
        ("mime", "No such command 'mime'"),
    ],
)
def test_wrong_usage_is_told(umim: Umim, line: str, message: str) -> None:
    result = umim(*line.split())
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.replace("│", " ").split())


def test_every_command_helps_and_no_word_is_taken_for_markup(umim: Umim) -> None:
    """Rich leaves out what stands in brackets, a default say."""
    commands = get_command(app).commands
    assert len(commands) == 19
    for name, command in commands.items():
        assert umim(name, "--help").code == 0
        texts = [command.help, *(getattr(option, "help", None) for option in command.params)]
        assert not [text for text in texts if text and "[" in text]


def test_nothing_heavy_is_imported_for_it() -> None:
    """One command after the other in one process: each may import more."""
    light = (
        ("--help", "numpy torch transformers numba pyarrow"),
        ("mine no.txt --out x --threads 0", "torch transformers numba pyarrow"),
        ("compress return", "torch pandas scipy.sparse"),
    )
    probe = (
        "import sys\nfrom umim_core.cli.app import main\n"
        f"for line, heavy in {light!r}:\n    sys.argv = ['umim', *line.split()]\n"
        "    try:\n        main()\n    except SystemExit:\n        pass\n"
        "    print(line, [name for name in heavy.split() if name in sys.modules])"
    )
    found = output_of(sys.executable, "-c", probe).splitlines()
    assert [f"{line} []" for line, _ in light] == [said for said in found if said[-1:] == "]"]


SHOWN = "Return the sum — 日本語 🙂 Привет"
NAME = "umim-docs-llama"
FEW = ("--max-new-tokens", "3")
COMMANDS = {
    "help": ("--help",),
    "version": ("--version",),
    "compress": ("compress", SHOWN, "-c", NAME),
    "compress as JSON": ("compress", SHOWN, "-c", NAME, "--json"),
    "generate, shown": ("generate", SHOWN, "-c", NAME, "--show", *FEW),
    "generate, streamed": ("generate", SHOWN, "-c", NAME, "--stream", *FEW),
    "path": ("path",),
}


TEXTS = ("compress", "generate, shown")  # they write the prompt itself


@pytest.mark.parametrize(
    ("command", "encoding"),
    [*((command, "ascii") for command in COMMANDS), *((command, "cp1252") for command in TEXTS)],
)
def test_every_terminal_encoding_takes_the_output(
    command: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding=encoding) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["umim", *COMMANDS[command]])
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    written = path.read_text(encoding)
    assert written.isascii() or encoding == "cp1252"
    if command in TEXTS:
        assert "\\u65e5" in written.replace("[", "").replace("]", "").replace("\n", "")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        *((command, "No space left on device") for command in COMMANDS),
        *((command, "Bad file descriptor") for command in ("path", "generate, streamed")),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = reason.startswith("Bad")
    with Path("/dev/full").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["umim", *COMMANDS[command]])
        patch.setattr(sys, "stdout", None if closed else stdout)  # as Python does for ``>&-``
        with pytest.raises(SystemExit) as end:
            main()
        sys.stdout.close()
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"umim: error: stdout must take the output; got {reason}"


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EACCES, SystemExit, "within reach; got place: .* who may read it"),
        (errno.ENOSPC, SystemExit, "place .* must be writable; got No space .* Free space"),
        (errno.EMFILE, OSError, "Too many open files: 'place'"),
        (errno.EIO, OSError, "Input/output error: 'place'"),
    ],
)
def test_what_the_system_refuses_of_a_file_is_told_as_what_it_is(
    number: int, kind: type[BaseException], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind) as end, telling("umim"):
        raise OSError(number, os.strerror(number), "place")
    assert re.search(said, capsys.readouterr().err or str(end.value))


def test_a_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from umim_core.cli.app import main; main()", "path"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate()
    assert process.returncode == 1
    assert len(said.splitlines()) <= 1 and "Traceback" not in said
