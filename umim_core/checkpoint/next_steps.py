"""Commands to run next: printed, ready to copy, by every command that writes a result.

Paths are quoted for the shell, so that a line can be copied as it stands.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umim_core.checkpoint.checkpoint_files import DEFAULT_CHECKPOINT, named_config
from umim_core.embedded.assets import embedded_names

if TYPE_CHECKING:
    from umim_core.text.reading import Reading

PROMPT: Final = "Once upon a time"
TASKS_FOLDER: Final = Path(__file__).parents[1] / "evaluation" / "tasks"  # for lm-eval's command
STEPS: Final = 200  # of ``umim train``
BATCH_SIZE: Final = 8  # likewise
_NAMED: Final = 8  # texts that a line names


def after_mining(
    out: Path, tokenizer: str | None, texts: Sequence[str], reading: Reading
) -> list[str]:
    command = ["umim", "train", tokenizer or "MODEL", *_read(texts, reading), "--rules", str(out)]
    command += ["--out", str(out.with_name(f"{out.name}-trained"))]
    return ["", "Next, train a merge module for these rules:", f"  {shlex.join(command)}"]


def after_fetching(name: str) -> list[str]:
    for checkpoint in sorted(embedded_names("checkpoint"), key=DEFAULT_CHECKPOINT.__ne__):
        if named_config(checkpoint).backbone == name:
            command = ["umim", "generate", PROMPT, "-c", checkpoint, "--show"]
            return ["", f"Next, generate with {checkpoint}:", f"  {shlex.join(command)}"]
    command = ["umim", "mine", "texts/*.txt", "--tokenizer", name, "--out", "rules"]
    return ["", "Next, mine rules from texts of your own:", f"  {' '.join(command)}"]


def _read(texts: Sequence[str], reading: Reading) -> list[str]:
    """Return texts, as far as a line can name them, and how they are read."""
    named = texts if len(texts) <= _NAMED else ["TEXTS"]
    return [*named, *(str(word) for pair in reading.flags.items() for word in pair)]


def after_making(
    checkpoint: Path, name: str | None, out: Path, *, to_serve: bool = False
) -> list[str]:
    """Return where a checkpoint in ``out`` is, the name that it has, if any, and how to use it."""
    named = [] if name is None else [f"name:       {name}   (umim path lists all)"]
    use = [f"  {shlex.join(['umim', 'serve', str(out)])}"] if to_serve else after_training(out)
    return [f"checkpoint: {checkpoint}", *named, "", "Next:", *use]


def after_training(checkpoint: str | Path) -> list[str]:
    generate = ["umim", "generate", PROMPT, "-c", str(checkpoint), "--show"]
    evaluate = ["lm_eval", "--model", "umim", "--model_args", f"checkpoint={checkpoint}"]
    task = ["--tasks", "umim_docstrings", "--limit", "100", "--include_path", str(TASKS_FOLDER)]
    return [
        f"  {shlex.join(generate)}",
        f"  {shlex.join([*evaluate, *task])}",
        "(Any task of lm-eval will do. This one is offline; its questions are made from the "
        "installed packages the first time, which takes some minutes.)",
    ]


def to_compare(recipe: Path) -> list[str]:
    return [
        "To compare it in MLflow, with the pipeline of the checkout:",
        f"  {shlex.join(['python', '-m', 'flows', 'run', str(recipe)])}",
    ]
