"""Files that share a service run together and first; the cluster is gone for all others."""

from __future__ import annotations

from pathlib import Path

import ray

from support.shared_services import group_of

TESTS = Path(__file__).resolve().parent


def test_files_that_ask_for_a_service_are_one_group_and_others_stand_alone() -> None:
    mining, flow = TESTS / "tasks/data/test_counting.py", TESTS / "flows/test_mine_flow.py"
    assert group_of(mining) == group_of(flow) == "services"
    assert group_of(TESTS / "flows/test_secrets.py") == "tiny run"
    ranks = ("test_strategies.py", "test_train_merges.py")
    assert {group_of(TESTS / "tasks/training" / name) for name in ranks} == {"ranks"}
    alone = TESTS / "rules/test_filters.py"
    assert group_of(alone) == str(alone)


def test_a_file_that_does_not_ask_for_it_meets_no_cluster() -> None:
    assert not ray.is_initialized()
