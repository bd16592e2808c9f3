"""``umim baselines``: every registered method with its side and one line."""

from __future__ import annotations

import json

import pytest

from support.command_line import console
from umim_core.baselines.methods import BASELINES


def test_all_methods_are_listed_with_what_they_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    umim = console(monkeypatch, capsys)
    found = json.loads(umim("baselines", "--json").out)["baselines"]
    assert sorted(one["name"] for one in found) == list(BASELINES.names())
    sides = {one["name"]: one["side"] for one in found}
    assert (sides["truncation"], sides["mean-embedding"]) == ("prompt", "prompt")
    assert (sides["full-cache"], sides["span-eviction-0"]) == ("cache", "cache")
    assert all(one["line"].endswith(".") for one in found)
    lines = umim("baselines").out.splitlines()
    assert [line.split()[:2] for line in lines] == [[one["name"], one["side"]] for one in found]
