"""Commands to run next: printed, ready to copy, by every command that writes a result.

Paths are quoted for the shell, so that a line can be copied as it stands.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.embedded.assets import embedded_names

PROMPT: Final = "Once upon a time"
_TASKS: Final = Path(__file__).parents[1] / "evaluation" / "tasks"  # the task of the package


def after_mining(out: Path, tokenizer: str | None, texts: Sequence[str]) -> list[str]:
    """Return how to train with mined rules.

    Args:
        out: Rule directory.
        tokenizer: What made the ids; the model is most often of the same name.
        texts: What was mined.
    """
    model = "MODEL" if tokenizer is None else tokenizer
    trained = out.with_name(f"{out.name}-trained")
    command = ["umim", "train", model, *texts, "--rules", str(out), "--out", str(trained)]
    return ["", "Next, train a merge module for these rules:", f"  {shlex.join(command)}"]


def after_fetching(name: str) -> list[str]:
    """Return how to use a packaged model.

    Args:
        name: The model; checkpoints for it may ship with UMIM.
    """
    for checkpoint in embedded_names("checkpoint"):
        if read_config(resolve_checkpoint(checkpoint)).backbone == name:
            command = ["umim", "generate", PROMPT, "-c", checkpoint, "--show"]
            return ["", f"Next, generate with {checkpoint}:", f"  {shlex.join(command)}"]
    command = ["umim", "mine", "texts/*.txt", "--tokenizer", name, "--out", "rules"]
    return ["", "Next, mine rules from texts of your own:", f"  {' '.join(command)}"]


def after_training(checkpoint: str | Path) -> list[str]:
    """Return how to use a checkpoint.

    Args:
        checkpoint: Its name or directory.
    """
    name = str(checkpoint)
    generate = ["umim", "generate", PROMPT, "-c", name, "--show"]
    evaluate = ["lm_eval", "--model", "umim", "--model_args", f"checkpoint={name}"]
    task = ["--tasks", "umim_docstrings", "--limit", "100", "--include_path", str(_TASKS)]
    return [
        f"  {shlex.join(generate)}",
        f"  {shlex.join([*evaluate, *task])}",
        "(Any task of lm-eval will do. This one is offline; its questions are made from the "
        "installed packages the first time, which takes some minutes.)",
    ]


def to_compare(recipe: Path) -> list[str]:
    """Return how to run a recipe from the checkout and where it is compared."""
    return [
        "To compare it in MLflow, with the pipeline of the checkout:",
        f"  {shlex.join(['python', '-m', 'flows', 'run', str(recipe)])}",
    ]
