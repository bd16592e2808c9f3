"""A pipeline on Postgres, MLflow and Prefect, each of which is killed and started again in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest
from mlflow import MlflowClient

from support.flow_runs import digests, said, start, wait_for_step
from support.servers import free_port
from support.small_recipe import write_recipe
from support.tracked_runs import files_of, runs_of
from tasks.run.services import down, local_services, status, up
from tasks.tracking.tracker import Tracker
from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.rules.ruleset import RuleSet

DISTILL = {"max_steps": 60, "batch_size": 2, "validation_rows": 2, "checkpoint_every": 2}
BACKBONE = "umim-docs-llama"


_SECONDS: Final = 60.0


class Postgres:
    """One cluster of databases behind one port.

    It does not run as root: there, the user of Debian's package has it.
    """

    def __init__(self, folder: Path) -> None:
        self.port, self._folder, self._as = free_port(), folder, list[str]()
        if os.geteuid() == 0:
            self._as = ["runuser", "-u", "postgres", "--"]
            shutil.chown(folder, "postgres", "postgres")
        options = ["--auth=trust", "--username=umim", "--encoding=UTF8", "--no-sync"]
        self._run("initdb", f"--pgdata={folder / 'data'}", *options)
        self.start()
        for name in ("mlflow", "prefect"):
            self._run(
                "createdb", f"--port={self.port}", "--host=127.0.0.1", "--username=umim", name
            )

    def start(self) -> None:
        settings = f"-p {self.port} -h 127.0.0.1 -k ''"
        places = [f"--pgdata={self._folder / 'data'}", f"--log={self._folder / 'log'}"]
        self._run("pg_ctl", "start", "--wait", f"--options={settings}", *places)

    def kill(self) -> None:
        kill(int((self._folder / "data" / "postmaster.pid").read_text("utf-8").split()[0]))

    def url(self, scheme: str, database: str) -> str:
        return f"{scheme}://umim@127.0.0.1:{self.port}/{database}"

    def _run(self, *command: str) -> None:
        subprocess.run(
            [*self._as, *command], check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=_SECONDS
        )


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run one until the block ends; the test is skipped without its programs or MLflow's driver."""
    pytest.importorskip("psycopg2", reason="MLflow on Postgres needs umim[server]")
    if shutil.which("initdb") is None:
        pytest.skip("Postgres is not there: its initdb is not in PATH")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # one that its user may enter
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.kill()


def kill(pid: int | None) -> None:
    """Kill a process with its children, as the end of a machine would."""
    father = psutil.Process(pid)
    family = [father, *father.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert psutil.wait_procs(family, timeout=_SECONDS)[1] == []


def recorded(uri: str, root: Path) -> dict[str, Any]:
    """What MLflow holds of a root: per run its status, parameters, numbers, curve and files."""
    client, found = MlflowClient(uri), dict[str, Any]()
    owner = Tracker(uri, root).owner["umim.root"]
    for run in runs_of(uri, query=f"tags.`umim.root` = '{owner}'"):
        tags = run.data.tags
        if tags.get("umim.stage") == "report":
            continue
        name = f"{tags['umim.kind']} {tags['umim.key']}"
        assert name not in found, "a run is there twice"
        curve = client.get_metric_history(run.info.run_id, "train_kl")
        found[name] = {
            "status": run.info.status,
            "params": run.data.params,
            "numbers": sorted(n for n in run.data.metrics if not n.startswith("live/")),
            "curve": sorted((point.step, point.value) for point in curve),
            "files": [*files_of(client, run.info.run_id)] if "umim.stage" in tags else [],
        }
    return found


def rules_of_phrases(folder: Path) -> Path:
    """Rules that need no cluster, whose end has tests of its own (``test_mining_faults.py``)."""
    tokenizer = load_tokenizer(BACKBONE)
    texts = ("Return the sum of the array elements over the axis.", "If the value is not None, it")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    spans = sorted({pair for row in ids for pair in pairwise(row)})
    RuleSet.from_spans(spans, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer)).save(folder)
    return folder


@pytest.mark.full
def test_a_pipeline_ends_as_an_undisturbed_one_though_each_service_dies_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recipe = tmp_path / "services", tmp_path / "killed.yaml"
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    cells = [{"backbone": BACKBONE, "rules": str(rules_of_phrases(tmp_path / "rules"))}]
    write_recipe(recipe, cells=cells, distill=DISTILL, cluster={"workers": 0})
    with postgres() as database:
        mlflow_database = database.url("postgresql+psycopg2", "mlflow")
        monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", mlflow_database)
        prefect_database = database.url("postgresql+asyncpg", "prefect")
        monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", prefect_database)
        prefect, mlflow, _ = local_services(folder, free_port(), free_port())
        api = f"{prefect.url}/api"
        addresses = {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": str(mlflow.url)}
        deaths: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (lambda: kill(status(folder, [mlflow])[0].pid), lambda: up(folder, [mlflow])),
            (lambda: kill(status(folder, [prefect])[0].pid), lambda: up(folder, [prefect])),
            (database.kill, database.start),
        ]
        try:
            up(folder, [prefect, mlflow])
            assert start(plain, recipe, **addresses).wait() == 0, said(plain)
            process = start(disturbed, recipe, **addresses)
            for number, (end, begin) in enumerate(deaths):
                wait_for_step(disturbed, 4 + 12 * number, process.poll)
                end()
                wait_for_step(disturbed, 8 + 12 * number, process.poll)  # it trains on without it
                process.send_signal(signal.SIGSTOP)  # a start may take longer than the training
                begin()
                process.send_signal(signal.SIGCONT)
            assert process.wait() == 0, said(disturbed)
            ours = recorded(str(mlflow.url), disturbed)
            assert ours == recorded(str(mlflow.url), plain)
            runs = httpx.post(f"{api}/flow_runs/filter", json={}, timeout=60).json()
        finally:
            down(folder, [prefect, mlflow])
    assert {run["status"] for run in ours.values()} == {"FINISHED"}
    assert [run["state"]["name"] for run in runs] == ["Completed", "Completed"]
    assert digests(disturbed, "report") == digests(plain, "report")
    assert not list(tmp_path.glob("services/*.db")), "the servers used Postgres"
