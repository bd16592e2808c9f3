"""Runs on a real sqlite store and a real server are found again, never lost, never doubled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.comparison import COMPARISON_PARAMS, Accuracy, ComparisonRow
from tasks.tracker import PREFECT_TAG, Tracker
from tasks.tracking import RunInput
from tasks.tracking_values import flatten, redact
from umim_core.errors import TrackingError

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    root = tmp_path_factory.mktemp("tracking")
    return Tracker(uri=f"sqlite:///{root / 'mlflow.db'}", root=root / "artifacts")


@pytest.fixture(scope="module")
def client(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracking_uri=tracker.uri, registry_uri=tracker.uri)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    (directory / "rules").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "rules" / "manifest.json").write_text('{"n": 1}')
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def _ids(client: MlflowClient) -> list[str]:
    found = client.get_experiment_by_name("umim")
    assert found is not None
    return [run.info.run_id for run in client.search_runs([found.experiment_id])]


def test_a_stage_run_holds_params_metrics_curves_files_and_inputs(
    tracker: Tracker, client: MlflowClient, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    parent = tracker.pipeline_run("p1", {"recipe": "tiny"})
    curve = [(step, 1.0 / (step + 1)) for step in range(2500)]
    run_id = tracker.stage_run(
        parent,
        "distill",
        "d1",
        {"steps": 3, "optimiser": {"lr": 0.002}},
        {"kl": 0.5, "top1": None, "broken": float("nan")},
        {"train_loss": curve},
        [note],
        [RunInput("tokens", "ab" * 32, "tokenize/xyz")],
    )
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "3", "optimiser.lr": "0.002"}
    assert run.data.metrics["kl"] == 0.5
    assert not {"top1", "broken"} & set(run.data.metrics)
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["umim.kind"] == "stage"
    history = client.get_metric_history(run_id, "train_loss")
    assert sorted((m.step, m.value) for m in history) == curve
    assert [f.path for f in client.list_artifacts(run_id)] == ["note.txt"]
    dataset = run.inputs.dataset_inputs[0].dataset
    assert dataset.name == "tokens"
    assert "ab" * 32 in dataset.source


def test_the_same_calls_again_add_no_run(tracker: Tracker, client: MlflowClient) -> None:
    def everything() -> list[str]:
        parent = tracker.pipeline_run("again", {"a": 1})
        stage = tracker.stage_run(parent, "filter", "f-again", {"tau": 5}, {"rules": 10.0})
        row = tracker.comparison_run("c-again", {"backbone": "b", "tau": 5}, {"top1": 0.5})
        tracker.finish(parent)
        return [parent, stage, row]

    first = everything()
    before = _ids(client)
    assert everything() == first
    assert _ids(client) == before


def test_a_stage_that_a_crash_left_open_is_completed_with_equal_points(
    tracker: Tracker, client: MlflowClient
) -> None:
    parent = tracker.pipeline_run("crash", {})

    def record() -> str:
        curves = {"seen": [(1, 1.0)]}
        return tracker.stage_run(parent, "count", "c-crash", {"tau": 5}, {"n": 7.0}, curves)

    run_id = record()
    client.update_run(run_id, status="RUNNING")
    assert record() == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    assert len(client.get_metric_history(run_id, "seen")) == 1


def test_a_failed_pipeline_is_opened_again_and_linked_to_the_new_flow_run(
    tracker: Tracker, client: MlflowClient
) -> None:
    run_id = tracker.pipeline_run("reopen", {"a": 1}, {PREFECT_TAG: "first"})
    tracker.finish(run_id, "FAILED")
    assert tracker.pipeline_run("reopen", {"a": 1}, {PREFECT_TAG: "second"}) == run_id
    run = client.get_run(run_id)
    assert run.info.status == "RUNNING"
    assert run.data.tags[PREFECT_TAG] == "second"


def test_pipelines_that_share_a_stage_both_name_its_run(
    tracker: Tracker, client: MlflowClient
) -> None:
    parents = [tracker.pipeline_run(f"share-{i}", {}) for i in range(2)]
    runs = {tracker.stage_run(parent, "corpus", "shared", {}, {}) for parent in parents}
    assert len(runs) == 1
    for parent in parents:
        assert client.get_run(parent).data.tags["umim.stage.corpus.shared"] in runs


def test_a_comparison_run_is_flat_and_has_the_names_others_query(
    tracker: Tracker, client: MlflowClient
) -> None:
    row = ComparisonRow(
        backbone="umim-docs-llama",
        tau=5,
        seed=0,
        metrics={"top1": 0.5, "ppl_umim_ood_stdlib": 40.0, "mrr": float("nan")},
        accuracies={"base": Accuracy(value=0.6), "WT": Accuracy(value=0.5)},
    )
    parent = tracker.pipeline_run("flat", {})
    run_id = tracker.comparison_run("flat-1", row.params(), row.measured(), pipeline=parent)
    data = client.get_run(run_id).data
    assert set(data.params) == set(COMPARISON_PARAMS)
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
    run_id = tracker.pipeline_run("register", {})
    version = tracker.register_checkpoint("lab/model-1.5", checkpoint, run_id)
    assert tracker.register_checkpoint("lab/model-1.5", checkpoint, run_id) == version
    found = client.get_model_version_by_alias("umim", "lab-model-1-5")
    assert str(found.version) == version
    folder = tmp_path / "fetched"
    folder.mkdir()
    fetched = Path(client.download_artifacts(run_id, "checkpoint/lab-model-1-5", str(folder)))
    names = {p.relative_to(fetched).as_posix() for p in fetched.rglob("*") if p.is_file()}
    assert names == {"config.json", "model.safetensors", "rules/manifest.json"}


def test_a_key_that_a_query_cannot_hold_is_refused(tracker: Tracker) -> None:
    with pytest.raises(TrackingError, match="a run key must be letters"):
        tracker.pipeline_run("x' or 1=1", {})


def test_a_missing_artifact_is_a_typed_error(tracker: Tracker, tmp_path: Path) -> None:
    run_id = tracker.pipeline_run("missing", {})
    with pytest.raises(TrackingError, match="must take what is written"):
        tracker.attach(run_id, [tmp_path / "absent.txt"])


def test_secrets_are_hidden_and_names_that_only_sound_like_them_are_not() -> None:
    flat = flatten({"hub": {"api_key": "s3cret", "token": "s3cret"}, "token_reduction": 0.4})
    assert flat == {"hub.api_key": "***", "hub.token": "***", "token_reduction": "0.4"}
    assert redact("http://me:pw@host:5000/x") == "http://***@host:5000/x"


def test_processes_that_start_together_share_one_run_and_lose_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tasks.tracker import Tracker\n"
        "root = Path(sys.argv[1]); t = Tracker(f'sqlite:///{root}/m.db', root)\n"
        "p = t.pipeline_run('together', {'a': 1})\n"
        "points = [(i, float(i)) for i in range(50)]\n"
        "t.stage_run(p, 'count', 'mine-' + sys.argv[2], {}, {}, {'m': points})\n"
        "t.stage_run(p, 'corpus', 'common', {'b': 1}, {'n': 2.0})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(i)], env=environment)
        for i in range(3)
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/m.db")
    runs = [client.get_run(run_id) for run_id in _ids(client)]
    keys = sorted(run.data.tags["umim.key"] for run in runs)
    assert keys == ["common", "mine-0", "mine-1", "mine-2", "together"]
    own = [run.info.run_id for run in runs if run.data.tags["umim.key"].startswith("mine-")]
    assert [len(client.get_metric_history(run_id, "m")) for run_id in own] == [50, 50, 50]


def test_a_server_that_never_answers_costs_less_than_ten_seconds_in_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        began = time.monotonic()
        for key in ("a", "b", "c"):
            with pytest.raises(TrackingError, match="Start the server or set MLFLOW_TRACKING_URI"):
                tracker.pipeline_run(key, {})
        assert time.monotonic() - began < 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'served.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    process = subprocess.Popen(
        command,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=tmp_path,
    )
    try:
        _await(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=15)


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail("mlflow server did not start")


@pytest.mark.full  # the server takes half a minute to start
def test_everything_works_over_a_server_and_two_clients_share_runs(
    server: str, tmp_path: Path, checkpoint: Path
) -> None:
    tracker = Tracker(server, tmp_path)
    run_id = tracker.pipeline_run("served", {"a": 1})
    assert Tracker(server, tmp_path / "elsewhere").pipeline_run("served", {"a": 1}) == run_id
    stage = tracker.stage_run(run_id, "distill", "d", {}, {"kl": 1.0}, artifacts=[checkpoint])
    version = tracker.register_checkpoint("umim-docs-llama", checkpoint, stage)
    client = MlflowClient(tracking_uri=server, registry_uri=server)
    found = client.get_model_version_by_alias("umim", "umim-docs-llama")
    assert (str(found.version), found.run_id) == (version, stage)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    page = f"{server}/#/experiments/{experiment.experiment_id}/runs/{run_id}"
    assert tracker.run_url(run_id) == f"{page}?workflowType=machine_learning"
