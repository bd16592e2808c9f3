"""Names in ``--model_args``: checkpoint, backbone, ways of merging; refusals, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluation.conftest import likelihoods, rolling
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import CheckpointError, ConfigError, GenerationError
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
    ({"match": "umim"}, "match is the budget of a baseline"),
    ({"match": "hf", **BASELINE}, "match must be umim"),
    ({"match": "umim", "target_tr": 0.1, **BASELINE}, "a baseline has one budget"),
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
    with pytest.raises(ConfigError, match="prefix_token_id must be an id below"):
        UmimLM(str(checkpoint_path), device="cpu", prefix_token_id=1 << 20)


def test_another_backbone_is_taken_for_a_reason(
    checkpoint_path: Path,
    tmp_path: Path,
    other_backbone: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = str(other_backbone(tmp_path / "other"))
    reason = "it is quantised"
    UmimLM(str(checkpoint_path), backbone=other, device="cpu", allow_backbone_mismatch=reason)
    assert f"not the checkpoint's own backbone: {reason}" in caplog.text


def test_the_end_of_a_context_may_stay_raw(checkpoint_path: Path) -> None:
    requests = likelihoods([("the cat sat on the", " mat"), ("by the sea the old cat ", "house")])
    models = {
        raw_tail: UmimLM(str(checkpoint_path), raw_tail=raw_tail, device="cpu")
        for raw_tail in (1, 99)
    }
    scores = {tail: model.loglikelihood(requests) for tail, model in models.items()}
    base = UmimLM(str(checkpoint_path), "none", device="cpu").loglikelihood(requests)
    assert [score for score, _ in scores[99]] == pytest.approx([s for s, _ in base], abs=1e-4)
    assert scores[1] != scores[99]
    saved = {tail: model.realised["context_token_reduction"] for tail, model in models.items()}
    assert saved[99] == 0.0 < saved[1]
    assert models[99].get_model_info()["umim"]["raw_tail"] == 99


def test_spans_with_a_protected_token_are_no_rules(checkpoint_path: Path) -> None:
    made = Checkpoint.load(checkpoint_path)
    free, protected = (UmimLM(made, device="cpu", protect=by).merged_model for by in (None, "c"))
    texts = {i: free.backbone.decode([i]) for i in range(free.backbone.vocab_size)}
    spans = [
        {
            tuple(span)
            for ids in model.require_matcher().rules.ids_by_order.values()
            for span in ids.tolist()
        }
        for model in (free, protected)
    ]
    assert spans[1] == {span for span in spans[0] if not any("c" in texts[t] for t in span)}
    assert 0 < len(spans[1]) < len(spans[0])


COMMANDS = ["/bin/lm_eval", "/bin/lm-eval", "C:/Scripts/lm_eval.exe", "/lib/lm_eval/__main__.py"]


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_end_the_command_with_one_line(
    command: str,
    checkpoint_path: Path,
    tmp_path: Path,
    other_backbone: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--model", "umim"])
    other = f"backbone={other_backbone(tmp_path / 'other')},device=cpu"
    for arguments, message in {
        "checkpoint=nosuch": r"^umim: error: a checkpoint must be .*nosuch.*$",
        "checkpont=umim-docs-llama": r"got checkpont\. Did you mean 'checkpoint'\?$",
        f"checkpoint={checkpoint_path},{other}": r"^umim: error: this checkpoint belongs to .*$",
    }.items():
        with pytest.raises(SystemExit, match=message):
            UmimLM.create_from_arg_string(arguments)
    for options, message in (
        ({"task_data": str(tmp_path / "nothing")}, "error: task_data must name a folder .*$"),
        ({"task_dat": "x"}, r"got task_dat\. Did you mean 'task_data'\?$"),
    ):
        with pytest.raises(SystemExit, match=message):
            SpecTask({"task": DEFAULT_TASK, "metadata": options})


def test_a_hub_checkpoint_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="hub repository within reach; got 'no-owner/no-name"):
        UmimLM("no-owner/no-name")


def test_what_was_fetched_is_what_is_loaded(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that moves on between configuration and weights changes nothing."""
    fetched = iter([str(checkpoint_path), "a later revision"])
    monkeypatch.setattr("umim_core.model.hub.snapshot_download", lambda *_, **__: next(fetched))
    assert UmimLM("some/repository", device="cpu").merged_model.matcher is not None


def test_bars_are_hidden_where_tqdm_is_asked_to(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    model = UmimLM(str(checkpoint_path), "none", device="cpu")
    capfd.readouterr()
    model.loglikelihood_rolling(rolling(["the cat sat on the mat"]))
    assert capfd.readouterr().err == ""
