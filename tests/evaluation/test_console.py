"""Messages of lm-eval's own command when a model or a task cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import CheckpointError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lm_eval_tasks import SpecTask

COMMANDS = ["/bin/lm_eval", "/bin/lm-eval", "C:/Scripts/lm_eval.exe", "/lib/lm_eval/__main__.py"]


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look like lm-eval's command."""
    monkeypatch.setattr(sys, "argv", [request.param, "--model", "umim"])


@pytest.mark.usefixtures("command")
def test_an_unknown_checkpoint_ends_the_command_with_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^umim: error: a checkpoint must be .*nosuch.*$"):
        UmimLM.create_from_arg_string("checkpoint=nosuch")


@pytest.mark.usefixtures("command")
def test_a_misspelt_argument_ends_the_command_with_the_right_name() -> None:
    with pytest.raises(SystemExit, match=r"got checkpont\. Did you mean 'checkpoint'\?$"):
        UmimLM.create_from_arg_string("checkpont=umim-docs-llama")


@pytest.mark.usefixtures("command")
def test_a_missing_task_folder_ends_the_command_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^umim: error: task_data must name a folder .*$"):
        SpecTask({"task": DEFAULT_TASK, "metadata": {"task_data": str(tmp_path / "nothing")}})


def test_a_mismatch_ends_the_command_with_one_line(
    checkpoint_path: Path,
    tmp_path: Path,
    other_backbone: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/lm_eval"])
    arguments = {
        "checkpoint": str(checkpoint_path),
        "backbone": str(other_backbone(tmp_path / "other")),
        "device": "cpu",
    }
    with pytest.raises(SystemExit, match=r"^umim: error: this checkpoint belongs to .*$"):
        UmimLM.create_from_arg_obj(arguments)


def test_a_hub_checkpoint_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="hub repository within reach; got 'no-owner/no-name"):
        UmimLM("no-owner/no-name")
