"""Faults that only a GPU would show, on a simulated device: everything that takes one runs there.

The device can be registered before the first backward pass of a process only (see
``second_device``), so the tests of ``second_device_*.py`` run in one process of their own, and each
is reported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from xml.etree import ElementTree

import pytest
import torch

from support import second_device_evaluation, second_device_generation, second_device_training
from support.processes import run_command

pytestmark = pytest.mark.full
FILES = (second_device_evaluation, second_device_generation, second_device_training)
NAMES = [name for module in FILES for name in vars(module) if name.startswith("test_")]
SECONDS = 300

Outcomes = Mapping[str, list[ElementTree.Element]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The cases of each test by its name, as the other process reported them."""
    report = tmp_path_factory.mktemp("second") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [module.__file__ for module in FILES]
    done = run_command(*command, f"--junitxml={report}", *files, seconds=SECONDS)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[ElementTree.Element]] = {name: [] for name in NAMES}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  our own report
        found[case.attrib["name"].partition("[")[0]].append(case)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_second_device_agrees_with_the_cpu(name: str, outcomes: Outcomes) -> None:
    cases = outcomes[name]
    failed = [
        f"{case.attrib['name']}\n{fault.text}"
        for case in cases
        for kind in ("failure", "error")
        for fault in case.iter(kind)
    ]
    assert not failed, "\n\n".join(failed)
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert cases
    if len(skipped) == len(cases):
        pytest.skip("every case was skipped")


def test_this_process_knows_no_second_device(outcomes: Outcomes) -> None:
    assert outcomes
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
