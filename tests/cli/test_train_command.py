"""``umim train``: rules and text to a checkpoint, found again, gone on with, refused by name."""

from __future__ import annotations

import json
import logging
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Result, Umim
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe_files import load_any_recipe
from umim_core.store.artifacts import directory_digest

TINY = ("--segment-length", "16", "--batch-size", "4", "--steps", "6")


def train(umim: Umim, *more: object) -> Result:
    return umim("train", "model", "a.txt", "--rules", "rules", *more)


def test_a_training_is_found_again_and_the_next_commands_are_printed(
    umim: Umim, workplace: Path
) -> None:
    out = workplace / "trained"
    command = (*TINY, "--out", out, "--kind", "text")
    begun = train(umim, *command, "--json")
    assert begun.code == 0, begun.err
    forecast = r"of 4 rows and 6 validations of (\d) rows: about (\S+) s a step and (\S+) s a valid"
    ((rows, step, validation),) = re.findall(forecast, begun.err)
    assert float(step) == pytest.approx(1.5 * 4 / int(rows) * float(validation), rel=0.1)
    assert float(validation) < 60  # measured, not since the machine started
    written = (out / "manifest.json").stat().st_mtime_ns
    done = train(umim, *command)
    commands = [shlex.split(line) for line in done.out.splitlines() if line.startswith("  ")]
    assert [command[0] for command in commands] == ["umim", "lm_eval", "python"]
    assert commands[1][1:5] == ["--model", "umim", "--model_args", f"checkpoint={out}"]
    assert commands[1][5:7] == ["--tasks", "umim_docstrings"]
    assert (Path(commands[1][-1]) / "umim_docstrings.yaml").is_file()
    shown = umim(*commands[0][1:3], "-c", out, "--max-new-tokens", 2)
    assert shown.code == 0
    config = Checkpoint.load(out).config
    assert config.training["steps"] == 6
    assert config.backbone == str((workplace / "model").resolve())
    recipe = load_any_recipe(Path(commands[2][-1]))
    assert [cell.rules for cell in recipe.cells] == [str(out / "checkpoint" / "rules")] * 2
    assert json.loads(train(umim, *command, "--json").out) == json.loads(begun.out)
    assert (out / "manifest.json").stat().st_mtime_ns == written
    other = train(umim, *command, "--seed", 1)
    assert other.code == 1
    assert "must be the result of this very call" in other.err


def interrupt(record: logging.LogRecord) -> bool:
    """Press Ctrl-C at the fourth step."""
    if record.getMessage().startswith("step 4:"):
        raise KeyboardInterrupt
    return True


def test_a_stopped_training_goes_on_and_ends_with_the_same_bytes(
    umim: Umim, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("umim.train")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addFilter(interrupt)
    options = (*TINY, "--rule-rows", 2)
    stopped = train(umim, *options, "--out", workplace / "trained")
    logger.removeFilter(interrupt)
    assert stopped.code == 130
    assert "the same command goes on" in stopped.err
    other = train(umim, *options, "--out", workplace / "trained", "--seed", 1)
    assert "got work with other settings or inputs" in other.err
    tokens = workplace / "trained.partial" / "whole" / "tokens" / "train.npy"
    whole = tokens.read_bytes()
    np.save(tokens, np.full(64, 1 << 18, np.uint32))
    damaged = train(umim, *options, "--out", workplace / "trained")
    assert damaged.code == 1 and "ids must lie between 0 and 31; got row 2: 262144" in damaged.err
    tokens.write_bytes(whole)
    resumed = train(umim, *options, "--out", workplace / "trained")
    assert "resuming at step 3" in resumed.err
    assert "3 steps of 4 rows and 3 validations" in resumed.err
    train(umim, *options, "--out", workplace / "whole")
    assert bool(Checkpoint.load(workplace / "whole").module.rows.table.any())
    digests = {directory_digest(workplace / x / "checkpoint") for x in ("trained", "whole")}
    assert len(digests) == 1


def test_a_checkpoint_is_trained_further_in_its_form(umim: Umim, workplace: Path) -> None:
    form = ("--residual", "last", "--unit-positions", "preserved", "--adapter-rank", 2)
    first, second = workplace / "first", workplace / "second"
    plain = ("--learning-rate", 8e-4, "--prompt-rows", 0, "--copy-rows", 0)
    begun = train(umim, *TINY, *form, *plain, "--out", first, "--json")
    refused = train(umim, *TINY, "--residual", "exponential", "--start", first, "--out", second)
    assert refused.code == 1 and "a module that is trained further keeps its form" in refused.err
    done = train(umim, *TINY, *plain, "--start", first, "--out", second, "--json")
    assert done.code == 0
    one, two = Checkpoint.load(first), Checkpoint.load(second)
    assert two.config.form() == one.config.form() and two.config.adapter_rank == 2
    assert one.module.digest() != two.module.digest()
    report = json.loads(done.out)
    ended = json.loads(begun.out)["kl_best"]
    assert report["kl_first"] == pytest.approx(ended, abs=1e-2)  # it was saved in bfloat16
    assert not (second / "recipe.yaml").exists()
