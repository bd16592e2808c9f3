"""Runs on a real sqlite store are found again, never lost, never doubled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from support.tracked_runs import runs_of
from tasks.report.compare import cell_row
from tasks.report.comparison import COMPARISON_PARAMS, Measured
from tasks.tracking.mlflow_store import Store
from tasks.tracking.tracker import PREFECT_TAG, Tracker
from tasks.tracking.tracking_values import RunInput, flatten
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.config.recipe import DEFAULT_TASK, Cell
from umim_core.errors import TrackingError


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    root = tmp_path_factory.mktemp("tracking")
    return Tracker(uri=f"sqlite:///{root / 'mlflow.db'}", root=root / "artifacts")


@pytest.fixture(scope="module")
def client(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracking_uri=tracker.uri, registry_uri=tracker.uri)


def test_records_and_stages_have_one_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UMIM_ROOT", raising=False)
    assert Tracker().root == artifact_root()
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    assert Tracker().root == artifact_root()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    (directory / "rules").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "rules" / "manifest.json").write_text('{"n": 1}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def _runs(client: MlflowClient) -> dict[tuple[str, str], Run]:
    """Every run by kind and key; a second one of a key fails."""
    runs = runs_of(client.tracking_uri)
    keyed = {(run.data.tags["umim.kind"], run.data.tags["umim.key"]): run for run in runs}
    assert len(keyed) == len(runs)
    return keyed


def test_a_stage_run_holds_params_metrics_curves_files_and_inputs(
    tracker: Tracker, client: MlflowClient, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    tracker.pipeline_run("p1", {"recipe": "tiny"})
    curve = [(step, 1.0 / (step + 1)) for step in range(2500)]
    tracker.stage_run(
        "p1",
        "distill",
        "d1",
        {"steps": 3, "optimiser": {"lr": 0.002}},
        {"kl": 0.5, "top1": None, "broken": float("nan"), "pass@1": 0.25},
        {"train_loss": curve},
        [note],
        [RunInput("tokens", "ab" * 32, "tokenize/xyz")],
    )
    tracker.finish("p1")
    runs = _runs(client)
    run = runs["stage", "d1"]
    run_id, parent = run.info.run_id, runs["pipeline", "p1"].info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "3", "optimiser.lr": "0.002"}
    assert run.data.metrics["kl"] == 0.5 and run.data.metrics["pass_at_1"] == 0.25
    assert not {"top1", "broken"} & set(run.data.metrics)
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["umim.kind"] == "stage"
    history = client.get_metric_history(run_id, "train_loss")
    assert sorted((m.step, m.value) for m in history) == curve
    assert [f.path for f in client.list_artifacts(run_id)] == ["note.txt"]
    dataset = run.inputs.dataset_inputs[0].dataset
    assert dataset.name == "tokens"
    assert "ab" * 32 in dataset.source


def test_metrics_that_are_zero_are_kept(tracker: Tracker, client: MlflowClient) -> None:
    tracker.pipeline_run("zero", {})
    tracker.points("zero", [("live/kl", 0, 0.0)])
    tracker.stage_run("zero", "distill", "d-zero", {}, {"kl": 0.0}, {"loss": [(0, 0.0)]})
    tracker.comparison_run("c-zero", {"tau": 0}, {"rules": 0.0, "top1": 0})
    runs = _runs(client)
    assert runs["pipeline", "zero"].data.metrics == {"live/kl": 0.0}
    assert runs["stage", "d-zero"].data.metrics == {"kl": 0.0, "loss": 0.0}
    assert runs["comparison", "c-zero"].data.metrics == {"rules": 0.0, "top1": 0.0}
    assert runs["comparison", "c-zero"].data.params == {"tau": "0"}


def test_a_stage_that_a_crash_left_open_is_completed_with_equal_points(
    tracker: Tracker, client: MlflowClient
) -> None:
    tracker.pipeline_run("crash", {})

    def record() -> Run:
        curves = {"seen": [(1, 1.0)]}
        tracker.stage_run("crash", "count", "c-crash", {"tau": 5}, {"n": 7.0}, curves)
        return _runs(client)["stage", "c-crash"]

    run_id = record().info.run_id
    client.update_run(run_id, status="RUNNING")
    assert record().info.status == "FINISHED"
    assert len(client.get_metric_history(run_id, "seen")) == 1


def test_a_failed_pipeline_is_opened_again_and_linked_to_the_new_flow_run(
    tracker: Tracker, client: MlflowClient
) -> None:
    tracker.pipeline_run("reopen", {"a": 1}, {PREFECT_TAG: "first"})
    tracker.finish("reopen", "FAILED")
    assert _runs(client)["pipeline", "reopen"].info.status == "FAILED"
    tracker.pipeline_run("reopen", {"a": 1}, {PREFECT_TAG: "second"})
    run = _runs(client)["pipeline", "reopen"]
    assert run.info.status == "RUNNING"
    assert run.data.tags[PREFECT_TAG] == "second"


def test_pipelines_that_share_a_stage_both_name_its_run(
    tracker: Tracker, client: MlflowClient
) -> None:
    for parent in ("share-0", "share-1"):
        tracker.pipeline_run(parent, {})
        tracker.stage_run(parent, "corpus", "shared", {}, {})
    runs = _runs(client)
    for parent in ("share-0", "share-1"):
        named = runs["pipeline", parent].data.tags["umim.stage.corpus.shared"]
        assert named == runs["stage", "shared"].info.run_id


def test_a_comparison_run_is_flat_and_has_the_names_others_query(
    tracker: Tracker, client: MlflowClient
) -> None:
    row = cell_row(
        Cell(backbone="umim-docs-llama"),
        seed=0,
        metrics={"top1": 0.5, "ppl_umim_ood_stdlib": 40.0, "mrr": float("nan")},
        scores={
            (DEFAULT_TASK, setting): {"acc_tok": Measured(value=value)}
            for setting, value in (("base", 0.6), ("WT", 0.5))
        },
    )
    tracker.pipeline_run("flat", {}, {"umim.recipe": "novels"})
    tracker.comparison_run("flat-1", row.params(), row.measured(), pipeline="flat")
    runs = _runs(client)
    data = runs["comparison", "flat-1"].data
    assert data.tags["umim.pipeline"] == runs["pipeline", "flat"].info.run_id
    assert set(data.params) == {*COMPARISON_PARAMS, "method", "form", "recipe"}
    assert data.params["form"] == "attention, depth 1, positions none"
    assert (data.params["method"], data.params["recipe"]) == ("umim", "novels")
    assert runs["comparison", "flat-1"].info.run_name == "novels: flat-1"
    assert data.params["tau"] == "5"
    assert data.metrics == {
        "top1": 0.5,
        "ppl_umim_ood_stdlib": 40.0,
        "accuracy_base": 0.6,
        "accuracy_umim": 0.5,
    }
    assert data.tags["umim.kind"] == "comparison"
    assert "mlflow.parentRunId" not in data.tags


def test_a_checkpoint_is_registered_once_under_its_backbones_alias(
    tracker: Tracker, client: MlflowClient, checkpoint: Path, tmp_path: Path
) -> None:
    tracker.pipeline_run("register", {})
    tracker.stage_run("register", "distill", "d-register", {}, {})
    for _ in range(2):
        tracker.register_checkpoint("lab/model-1.5", checkpoint, "d-register")
        tracker.finish("register")
    found = client.get_model_version_by_alias("umim", "lab-model-1-5")
    run_id = _runs(client)["stage", "d-register"].info.run_id
    assert found.run_id == run_id
    assert len(client.search_model_versions(f"run_id = '{run_id}'")) == 1
    folder = tmp_path / "fetched"
    folder.mkdir()
    fetched = Path(client.download_artifacts(run_id, "checkpoint/lab-model-1-5", str(folder)))
    names = {p.relative_to(fetched).as_posix() for p in fetched.rglob("*") if p.is_file()}
    assert names == {"config.json", "model.safetensors", "rules/manifest.json"}


def test_a_key_that_a_query_cannot_hold_is_refused(tracker: Tracker) -> None:
    with pytest.raises(TrackingError, match="a run key must be letters"):
        tracker.pipeline_run("x' or 1=1", {})


def test_secrets_are_hidden_and_names_that_only_sound_like_them_are_not() -> None:
    flat = flatten({"hub": {"api_key": "s3cret", "token": "s3cret"}, "token_reduction": 0.4})
    assert flat == {"hub.api_key": "***", "hub.token": "***", "token_reduction": "0.4"}


def test_a_table_that_a_kill_left_unlisted_is_there_once_and_listed(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # which load_table searches
    name, columns = "samples/tiny.json", {"prompt": ["a", "b"], "acc": [0.0, float("nan")]}
    client = MlflowClient(store)
    with Store(store, tmp_path).session(60, 1, 1) as opened:
        run = opened.ensure("harness", "k" * 64, "results", {}, time_ms=1)
        client.log_text(run.run_id, '{"columns":["prompt"', name)  # as a kill leaves it
        for _ in range(2):
            opened.log_table(run.run_id, columns, name)
        opened.log_table(run.run_id, columns, "samples/other.json")
        table = client.load_table(opened.experiment_id, name, [run.run_id])
    assert table["prompt"].tolist() == ["a", "b"] and table["acc"].isna().tolist() == [False, True]
    tag = json.loads(client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in tag] == [name, "samples/other.json"]
