"""Independent parts of a flow: side by side, results in order, errors that stop the rest."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe
from tasks.run.side_by_side import side_by_side
from tasks.tracking.tracker import Tracker
from umim_core.config.recipe import ClusterConfig

_place: ContextVar[str] = ContextVar("place", default="nowhere")


def test_parts_run_at_the_same_time_and_their_results_are_in_order() -> None:
    both = threading.Barrier(2, timeout=30)  # passed only if two parts are there at once
    assert side_by_side([lambda n=n: (both.wait(), n)[1] for n in range(4)], 2) == [0, 1, 2, 3]


def test_a_run_knows_how_many_parts_were_under_way(tmp_path: Path) -> None:
    recipe = find_recipe("tables/multiple-choice-llama-3.1-8b")
    run = PipelineRun(recipe, tmp_path, ClusterLease(recipe.cluster), Tracker("", tmp_path), "k")
    seen = []
    for parts, most in ((1, 8), (3, 2), (3, 8), (1, 1)):
        run.together([int] * parts, most)
        seen.append(run.at_a_time)
    assert seen == [1, 2, 3, 3]


def test_one_at_a_time_stays_in_the_calling_thread() -> None:
    here = threading.get_ident()
    assert side_by_side([threading.get_ident] * 3, 1) == [here] * 3


def test_a_part_sees_the_context_of_the_flow() -> None:
    token = _place.set("in the flow")
    try:
        assert side_by_side([_place.get, _place.get], 2) == ["in the flow"] * 2
    finally:
        _place.reset(token)


def test_parts_share_the_threads_of_torch_which_the_caller_gets_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert side_by_side([torch.get_num_threads] * 2, 2) == [2, 2]
        assert side_by_side([torch.get_num_threads] * 2, 4) == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_an_error_lets_those_under_way_end_and_keeps_the_others_from_beginning() -> None:
    done: list[str] = []
    under_way, failed = threading.Event(), threading.Event()

    def fails() -> None:
        under_way.wait(30)
        failed.set()
        raise ZeroDivisionError

    def ends() -> None:
        under_way.set()
        failed.wait(30)
        time.sleep(0.5)  # the error is on its way out of its part
        done.append("under way")

    others = [lambda: done.append("begun")] * 8
    with pytest.raises(ZeroDivisionError):
        side_by_side([fails, ends, *others], 2)
    assert done == ["under way"]


def test_the_errors_of_other_parts_are_noted_on_the_first() -> None:
    both = threading.Barrier(2, timeout=30)

    def fails(error: Exception) -> None:
        both.wait()
        raise error

    parts = [lambda: fails(KeyError("one")), lambda: fails(OSError("the disk is full"))]
    with pytest.raises(KeyError) as raised:
        side_by_side([*parts, lambda: None], 2)
    assert raised.value.__notes__ == ["Another part failed, too: OSError: the disk is full"]


def test_stages_share_no_gpu() -> None:
    with pytest.raises(ValidationError, match="leave parallel_stages out with use_gpu"):
        ClusterConfig(parallel_stages=2, use_gpu=True)
