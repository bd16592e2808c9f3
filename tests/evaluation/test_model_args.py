"""Names in ``--model_args``: checkpoint, backbone, ways of merging; refusals, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.evaluation.conftest import save_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import ConfigError, GenerationError
from umim_core.evaluation import harness
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lm_eval_tasks import SpecTask

BASELINE = {"method": "truncation"}
REFUSED = [
    ({"merge": "contexts"}, r"merge must be one of .*'prompt'"),
    ({"merge": "prompt", "raw_tail": -1}, "raw_tail must be an integer"),
    ({"merge": "none", "raw_tail": 2}, "raw_tail needs a prompt"),
    ({"merge": "none", "compare": "base"}, "compare=base needs a model that merges"),
    ({"merge": "prompt", "compare": "hf"}, "compare must be base; got compare=hf"),
    ({"merge": "none", "protect": "c"}, "protect keeps tokens from being merged"),
    ({"merge": "none", "target_tr": 0.1}, "target_tr chooses rules"),
    ({"merge": "none", "budget": 0.1}, "budget chooses rules"),
    ({"revision": "main"}, "revision is that of a backbone"),
    ({"batch_size": "many"}, "batch_size must be .*auto:N .*; got many"),
    ({"batch_size": "auto:auto"}, "batch_size must be .*; got auto:auto"),
    ({"batch_size": "auto:0.0"}, "batch_size must be .*; got auto:0.0"),
    ({"batch_size": "auto", "max_batch_size": None}, "max_batch_size must be .*; got None"),
    ({"batch_size": 0}, "batch_size must be .*; got 0"),
    ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1; got 0"),
    ({"max_length": "long"}, "max_length must be .*; got long"),
    ({"max_length": -5.0}, "max_length must be .*; got -5.0"),
    ({"merge": "none", "allow_backbone_mismatch": "why"}, "must not come with merge=none"),
    ({"protect": "c", **BASELINE}, "protect is of the checkpoint's own rules"),
    ({"merge": "all", **BASELINE}, "merges prompts only; got .*truncation.*all"),
    ({"merge": "none", **BASELINE}, "merges prompts only; got .*truncation.*none"),
    ({"target_tr": 0.1, "method": "h2o", "raw_tail": 2}, "raw_tail changes nothing"),
    ({"method": "truncatoin"}, "baseline must be one of .* mean 'truncation'"),
    ({"dtype": "float31"}, "dtype must be one of .*; got float31"),
    ({"roles": "users"}, "roles must be some of user, system, tools, tool"),
    ({"roles": "user", "merge": "none"}, "roles say whose contents of a chat merge"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_arguments_that_do_not_go_together_are_refused_before_anything_is_fetched(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "named_checkpoint", None)
    with pytest.raises(ConfigError, match=message):
        UmimLM("umim-docs-llama", **options)


def test_what_a_checkpoint_recommends_is_checked_as_what_is_asked_for(
    checkpoint_path: Path,
) -> None:
    made = Checkpoint.load(checkpoint_path).recommending("none", 0)
    with pytest.raises(ConfigError, match="budget chooses rules"):
        UmimLM(made, device="cpu", budget=0.1)


def test_arguments_of_the_model_win_over_those_of_the_command(checkpoint_path: Path) -> None:
    given = {"checkpoint": str(checkpoint_path), "device": "cpu", "merge": None}
    model = UmimLM.create_from_arg_obj(given, {"device": "cuda:0", "batch_size": "2", "x": None})
    assert UmimLM(**given, batch_size="auto:0.5").batch_schedule == 0.5
    assert (model.merge, model.device.type, model.rows_per_forward(9)) == ("none", "cpu", 2)
    for named in (True, "default"):
        with pytest.raises(GenerationError, match="needs a tokenizer with a chat template"):
            model.chat_template(named)
    assert model.chat_template(False) is None


def test_another_backbone_is_taken_for_a_reason(
    checkpoint_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = str(save_backbone(tmp_path, seed=9))
    reason = "it is quantised"
    UmimLM(str(checkpoint_path), backbone=other, device="cpu", allow_backbone_mismatch=reason)
    assert f"not the checkpoint's own backbone: {reason}" in caplog.text


COMMANDS = ["/bin/lm-eval", "C:/Scripts/lm_eval.exe", "/lib/lm_eval/__main__.py", "/bin/lm_eval"]


def test_errors_end_the_command_with_one_line(
    checkpoint_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", [command, "--model", "umim"])
        with pytest.raises(SystemExit, match=r"^umim: error: a checkpoint must be .*nosuch.*$"):
            UmimLM.create_from_arg_string("checkpoint=nosuch")
    other = f"backbone={save_backbone(tmp_path, seed=9)},device=cpu"
    for arguments, message in {
        "checkpont=umim-docs-llama": r"got checkpont\. Did you mean 'checkpoint'\?$",
        f"checkpoint={checkpoint_path},{other}": r"^umim: error: this checkpoint belongs to .*$",
    }.items():
        with pytest.raises(SystemExit, match=message):
            UmimLM.create_from_arg_string(arguments)
    for options, message in (
        ({"task_data": str(tmp_path / "nothing")}, "error: task_data must name a folder .*$"),
        ({"task_dat": "x"}, r"task_dat must be a known field; got x. Did you mean 'task_data'\?$"),
    ):
        with pytest.raises(SystemExit, match=message):
            SpecTask({"task": DEFAULT_TASK, "metadata": options})


def test_what_was_fetched_is_what_is_loaded(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that moves on between configuration and weights changes nothing."""
    fetched = iter([str(checkpoint_path), "a later revision"])
    monkeypatch.setattr("umim_core.model.hub.snapshot_download", lambda *_, **__: next(fetched))
    assert UmimLM("some/repository", device="cpu").merged_model.matcher is not None
