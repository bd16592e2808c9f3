"""Examples of the documents: Python runs, command lines have options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from flows.cli import app as flows_app
from support.processes import ROOT, need_model
from umim_core.cli.app import app as umim_app
from umim_core.embedded.assets import embedded_path
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.prompt_merger import PromptMerger

DOCUMENTS = {
    path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
COMMANDS = {"umim": umim_app, "python -m flows": flows_app}
# What a document's Python has from the text around it.
GIVEN = {
    "evaluate.md": {},
    "generate.md": {
        "prompt": "Return the sum of the elements",
        "document": "Return a new array with the same shape as a given array.",
        "question": " It is",
        "other": " Its type is",
    },
    "engines.md": {"ids": list(range(300))},
}
LEFT_OUT = {
    "README.md": "it is run below, on the model that it names",
    "serve.md": "needs openai's client and a server: tests/serving asks its own",
}


def blocks(name: str, *languages: str) -> list[str]:
    text = DOCUMENTS[name].read_text("utf-8")
    return [
        code
        for kind, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
        if kind in languages
    ]


def test_every_document_has_its_examples_found_and_python_is_run_or_says_why_not() -> None:
    assert len(EXAMPLES) > 40
    assert len([name for name, _ in PROOFS if name == "exactness.md"]) >= 4
    assert {name for name in DOCUMENTS if blocks(name, "python")} == {*GIVEN, *LEFT_OUT}


@pytest.mark.parametrize("name", GIVEN)
def test_the_python_of_a_document_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the embedded model, in place of those that would be fetched."""
    monkeypatch.chdir(tmp_path)
    rules = embedded_path("umim-docs-llama", "checkpoint")
    assert rules is not None
    (tmp_path / "served").mkdir()
    PromptMerger(RuleSet.load(rules / "rules"), 8192, 16).write(tmp_path / "served")
    code = re.sub(r'"umim-smollm2-[\w-]+"', '"umim-docs-llama"', "\n".join(blocks(name, "python")))
    exec(compile(code, name, "exec"), dict(GIVEN[name]))  # noqa: S102  # our own documents


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    need_model()
    (block,) = blocks("README.md", "python")
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102  # our own README
    shown = capsys.readouterr().out
    text = " ".join(DOCUMENTS["README.md"].read_text("utf-8").split())
    (promised,) = re.findall(r'answers, "(.*?)"', text)
    assert promised in shown
    assert re.search(r"\([12]\d% of the prompt's tokens saved\)", shown)
    assert re.search(r"\[ ?\w+ \w+", shown)  # a merged span, where there are no colours


def command_lines(text: str) -> list[str]:
    """Return the command lines of a block: those with a $, or all; quotes may span lines."""
    lines, prompts = [], "$ " in text
    rest = iter(text.splitlines())
    for line in rest:
        command = line.removeprefix("$ ") if line.startswith("$ ") or not prompts else ""
        while command and not whole(command):
            command = command.removesuffix("\\") + "\n" + next(rest)
        lines.append(command)
    return lines


def whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quote
        return False
    return not command.endswith("\\")


EXAMPLES = [
    (name, program, line)
    for name in DOCUMENTS
    for text in blocks(name, "console", "bash")
    for line in command_lines(text)
    for program in COMMANDS
    if line.startswith(f"{program} ")
]


@pytest.mark.parametrize(("name", "program", "line"), EXAMPLES)
def test_a_command_line_of_a_document_can_be_given(name: str, program: str, line: str) -> None:
    arguments = shlex.split(line, comments=True)[len(program.split()) :]
    for end in ("&&", "|", "&", ";"):
        arguments = arguments[: arguments.index(end)] if end in arguments else arguments
    command, context = typer.main.get_command(COMMANDS[program]), None
    while isinstance(command, TyperGroup):
        context = command.make_context(program, [arguments[0]], parent=context)
        found = command.get_command(context, arguments[0])
        assert found is not None, f"{name}: {line}"
        command, arguments = found, arguments[1:]
    command.make_context(str(command.name), arguments, parent=context)


PROOFS = [
    (name, line.partition(" #")[0].strip())
    for name in DOCUMENTS
    for text in blocks(name, "console")
    for line in command_lines(text)
    if line.startswith("pytest ")
]


@pytest.mark.parametrize(("name", "line"), PROOFS)
def test_a_proof_of_a_document_runs_tests_that_exist(name: str, line: str) -> None:
    places, _, words = line.removeprefix("pytest ").partition(" -k ")
    files = [
        file
        for place in places.split()
        for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("test_*.py"))
    ]
    assert files, f"{name}: {line}"
    tests = re.findall(r"^def (test_\w+)", "".join(file.read_text("utf-8") for file in files), re.M)
    for word in words.strip('"').split(" or ") if words else ("test_",):
        assert any(word in test for test in tests), f"{name}: no test of {line} has {word}"
