"""Commands to run next: printed, ready to copy, by every command that writes a result.

Paths are quoted for the shell, so that a line can be copied as it stands.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umim_core.checkpoint.checkpoint_files import (
    DEFAULT_CHECKPOINT,
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.embedded.assets import embedded_names

if TYPE_CHECKING:
    from umim_core.text.sources import Reading

PROMPT: Final = "Once upon a time"
TASKS_FOLDER: Final = Path(__file__).parents[1] / "evaluation" / "tasks"  # for lm-eval's command
STEPS: Final = 200  # of ``umim train``
BATCH_SIZE: Final = 8  # likewise
_FEWEST_STEPS: Final = 50
_MANY: Final = 3  # files that are named by their folder


def after_mining(
    out: Path,
    tokenizer: str | None,
    texts: Sequence[str],
    *,
    reading: Reading,
    tokens: int,
    segment_length: int,
) -> list[str]:
    """Return how to train with mined rules."""
    model = "MODEL" if tokenizer is None else tokenizer
    trained = out.with_name(f"{out.name}-trained")
    command = ["umim", "train", model, *_short(texts, reading), "--rules", str(out)]
    command += _flags(reading)
    once = math.ceil(tokens / (BATCH_SIZE * segment_length) / 10) * 10  # reads the text once
    steps = min(max(once, _FEWEST_STEPS), STEPS)  # within what a first try needs
    command += ["--steps", str(steps), "--out", str(trained)]
    return ["", "Next, train a merge module for these rules:", f"  {shlex.join(command)}"]


def after_fetching(name: str) -> list[str]:
    for checkpoint in sorted(embedded_names("checkpoint"), key=DEFAULT_CHECKPOINT.__ne__):
        if read_config(resolve_checkpoint(checkpoint)).backbone == name:
            command = ["umim", "generate", PROMPT, "-c", checkpoint, "--show"]
            return ["", f"Next, generate with {checkpoint}:", f"  {shlex.join(command)}"]
    command = ["umim", "mine", "texts/*.txt", "--tokenizer", name, "--out", "rules"]
    return ["", "Next, mine rules from texts of your own:", f"  {' '.join(command)}"]


def _flags(reading: Reading) -> list[str]:
    return [str(word) for pair in reading.flags.items() for word in pair]


def _short(texts: Sequence[str], reading: Reading) -> list[str]:
    """Return the folder of many files in their place, where it holds nothing else.

    A shell has written out ``novels/*.txt``; the command to be copied says ``novels``. A folder
    stands for its files of one kind, which their endings say, and not for hidden ones.
    """
    from umim_core.text.files import kind_of  # imports pyarrow

    folder, files = Path(texts[0]).parent, set(map(Path, texts))
    kinds = {None if file.name.startswith(".") else kind_of(file.name) for file in files}
    if (
        len(texts) < _MANY
        or len(kinds) > 1
        or kinds <= {None}
        or reading.kind not in {None, *kinds}
    ):
        return list(texts)
    try:
        is_whole = set(folder.iterdir()) == files
    except OSError:  # an address, or a folder that may not be listed
        is_whole = False
    return [str(folder)] if is_whole else list(texts)


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


def after_pruning(
    out: Path, config: CheckpointConfig, texts: Sequence[str], reading: Reading
) -> list[str]:
    """Return how to use a pruned checkpoint, and how to train it further with its rules.

    ``umim train`` takes models of no named revision; for others a recipe of the pipeline is named.
    """
    generate = ["umim", "generate", PROMPT, "-c", str(out), "--show"]
    use, rules = f"  {shlex.join(generate)}", str(out / "checkpoint" / "rules")
    if config.backbone_revision is not None:
        return [
            use,
            f"(A module of revision {config.backbone_revision} is trained by a recipe of the "
            f"pipeline; the rules are in {rules}.)",
        ]
    train = ["umim", "train", config.backbone, *_short(texts, reading), "--rules", rules]
    train += _flags(reading)
    train += ["--start", str(out), "--out", str(out.with_name(f"{out.name}-trained"))]
    return [use, f"  {shlex.join(train)}"]


def to_compare(recipe: Path) -> list[str]:
    return [
        "To compare it in MLflow, with the pipeline of the checkout:",
        f"  {shlex.join(['python', '-m', 'flows', 'run', str(recipe)])}",
    ]
