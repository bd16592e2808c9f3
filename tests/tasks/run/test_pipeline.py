"""Independent parts of a flow: side by side, results in order, errors that stop the rest."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch

from support.servers import free_port
from support.tracked_runs import runs_of
from tasks.cluster.nodes import code_identity
from tasks.run.pipeline import open_pipeline, side_by_side
from umim_core.config.recipe import Recipe
from umim_core.errors import CorpusError

_place: ContextVar[str] = ContextVar("place", default="nowhere")


def test_parts_run_at_the_same_time_and_their_results_are_in_order() -> None:
    both = threading.Barrier(2, timeout=120)  # passed only if two parts are there at once
    assert side_by_side([lambda n=n: (both.wait(), n)[1] for n in range(4)], 2) == [0, 1, 2, 3]

    assert side_by_side([threading.get_ident] * 3, 1) == [threading.get_ident()] * 3


def test_parts_see_the_context_of_the_flow_and_share_its_threads_which_it_gets_back() -> None:
    before, token = torch.get_num_threads(), _place.set("in the flow")
    try:
        assert side_by_side([_place.get, _place.get], 2) == ["in the flow"] * 2
        torch.set_num_threads(4)
        assert side_by_side([torch.get_num_threads] * 2, 2) == [2, 2]
        assert side_by_side([torch.get_num_threads] * 2, 4) == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
        _place.reset(token)


def test_an_error_lets_those_under_way_end_and_keeps_the_others_from_beginning() -> None:
    done: list[str] = []
    under_way, failed = threading.Event(), threading.Event()
    failing: list[threading.Thread] = []

    def fails() -> None:
        failing.append(threading.current_thread())
        under_way.wait(120)
        failed.set()
        raise ZeroDivisionError

    def ends() -> None:
        under_way.set()
        failed.wait(120)
        failing[0].join(120)  # its thread has seen the error, and all parts that are left
        done.append("under way")

    others = [lambda: done.append("begun")] * 8
    with pytest.raises(ZeroDivisionError):
        side_by_side([fails, ends, *others], 2)
    assert done == ["under way"]


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))


class Stopped(BaseException):
    """What Prefect's signals and Ctrl-C are: no ordinary error."""


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (CorpusError("no text"), "FAILED"), (Stopped(), "KILLED")],
)
def test_a_run_says_how_it_ended_and_which_code_made_it_where(
    error: BaseException | None,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    caplog.set_level(logging.INFO, "umim.pipeline")
    with suppress(CorpusError, Stopped), open_pipeline("embedded", "umim", Recipe):
        if error is not None:
            raise error
    (run,) = runs_of(store)
    assert run.info.status == status
    code = code_identity()
    assert len(code.lock) == len(code.sources) == 64
    wanted = {"umim.host": code.host, "umim.lock": code.lock, "umim.sources": code.sources}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.source.git.commit"] == code.commit
    told = f"MLflow: mlflow ui --backend-store-uri {store}, then http" in caplog.text
    assert told is (error is None), "a finished run says where the comparison is"


def test_a_run_without_a_server_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CorpusError), open_pipeline("embedded", "umim", Recipe):
        raise CorpusError("a corpus must have text")
