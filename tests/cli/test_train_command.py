"""``umim train``: rules and text to a checkpoint, found again, gone on with, refused by name."""

from __future__ import annotations

import json
import logging
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Result, Umim
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe_files import load_any_recipe
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]
TINY = ("--segment-length", "16", "--batch-size", "4", "--steps", "6")


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A model, rules for it, and a text in which they occur."""
    place = tmp_path_factory.mktemp("own")
    (place / "model").symlink_to(tiny_checkpoint.parent / "backbone")
    fingerprint = tokenizer_fingerprint(tiny_tokenizer)
    RuleSet.from_spans(SPANS, tokenizer_fingerprint=fingerprint).save(place / "rules")
    chosen = np.random.default_rng(7).integers(0, len(SPANS), 300)
    words = [f"w{token}" for number in chosen for token in (*SPANS[number], 10 + number)]
    (place / "text.txt").write_text(" ".join(words), encoding="utf-8")
    return place


def train(umim: Umim, folder: Path, *more: object) -> Result:
    return umim("train", folder / "model", folder / "text.txt", "--rules", folder / "rules", *more)


def test_a_training_is_found_again_and_the_next_commands_are_printed(
    umim: Umim, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trained"
    command = (*TINY, "--out", out, "--kind", "text")
    begun = train(umim, folder, *command, "--json")
    assert begun.code == 0, begun.err
    forecast = r"6 steps of 4 rows and 6 validations .*: about \S+ s a step and .* in all"
    assert re.search(forecast, begun.err)
    written = (out / "manifest.json").stat().st_mtime_ns
    done = train(umim, folder, *command)
    commands = [shlex.split(line) for line in done.out.splitlines() if line.startswith("  ")]
    assert [command[0] for command in commands] == ["umim", "lm_eval", "python"]
    assert commands[1][1:5] == ["--model", "umim", "--model_args", f"checkpoint={out}"]
    assert commands[1][5:7] == ["--tasks", "umim_docstrings"]
    assert (Path(commands[1][-1]) / "umim_docstrings.yaml").is_file()
    shown = umim(*commands[0][1:3], "-c", out, "--max-new-tokens", 2)
    assert shown.code == 0
    config = Checkpoint.load(out).config
    assert config.training["steps"] == 6
    assert config.backbone == str((folder / "model").resolve())
    recipe = load_any_recipe(Path(commands[2][-1]))
    assert [cell.rules for cell in recipe.cells] == [str(out / "checkpoint" / "rules")] * 2
    assert json.loads(train(umim, folder, *command, "--json").out) == json.loads(begun.out)
    assert (out / "manifest.json").stat().st_mtime_ns == written
    other = train(umim, folder, *command, "--seed", 1)
    assert other.code == 1
    assert "must be the result of this very call" in other.err


class Interrupt(logging.Handler):
    """Ctrl-C when a message is logged."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def handle(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(self._message):
            raise KeyboardInterrupt
        return True


def test_a_stopped_training_goes_on_and_ends_with_the_same_bytes(
    umim: Umim, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("umim.train")
    monkeypatch.setattr(logger, "level", logging.INFO)
    handler = Interrupt("step 4:")
    logger.addHandler(handler)
    options = (*TINY, "--rule-rows", 2)
    stopped = train(umim, folder, *options, "--out", tmp_path / "trained")
    logger.removeHandler(handler)
    assert stopped.code == 130
    assert "the same command goes on" in stopped.err
    other = train(umim, folder, *options, "--out", tmp_path / "trained", "--seed", 1)
    assert "got work with other settings or inputs" in other.err
    tokens = tmp_path / "trained.partial" / "whole" / "tokens" / "train.npy"
    whole = tokens.read_bytes()
    np.save(tokens, np.full(64, 1 << 18, np.uint32))
    damaged = train(umim, folder, *options, "--out", tmp_path / "trained")
    assert damaged.code == 1 and "token ids must lie in 0..262143" in damaged.err
    tokens.write_bytes(whole)
    resumed = train(umim, folder, *options, "--out", tmp_path / "trained")
    assert "resuming at step 3" in resumed.err
    assert "3 steps of 4 rows and 3 validations" in resumed.err
    train(umim, folder, *options, "--out", tmp_path / "whole")
    assert bool(Checkpoint.load(tmp_path / "whole").module.rows.table.any())
    digests = {directory_digest(tmp_path / x / "checkpoint") for x in ("trained", "whole")}
    assert len(digests) == 1


def test_a_checkpoint_is_trained_further_in_its_form(
    umim: Umim, folder: Path, tmp_path: Path
) -> None:
    form = ("--residual", "last", "--unit-positions", "preserved", "--adapter-rank", 2)
    first, second = tmp_path / "first", tmp_path / "second"
    plain = ("--learning-rate", 8e-4, "--prompt-rows", 0, "--copy-rows", 0)
    begun = train(umim, folder, *TINY, *form, *plain, "--out", first, "--json")
    refused = train(
        umim, folder, *TINY, "--residual", "exponential", "--start", first, "--out", second
    )
    assert refused.code == 1 and "a module that is trained further keeps its form" in refused.err
    done = train(umim, folder, *TINY, *plain, "--start", first, "--out", second, "--json")
    assert done.code == 0
    one, two = Checkpoint.load(first), Checkpoint.load(second)
    assert two.config.form() == one.config.form() and two.config.adapter_rank == 2
    assert one.module.digest() != two.module.digest()
    report = json.loads(done.out)
    ended = json.loads(begun.out)["kl_best"]
    assert report["kl_first"] == pytest.approx(ended, abs=1e-2)  # it was saved in bfloat16
    assert not (second / "recipe.yaml").exists()
