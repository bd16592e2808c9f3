"""Backbones loaded by several threads at once, as stages side by side do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from umim_core.backbone.backbone import load_backbone


@pytest.mark.parametrize("name", ["umim-docs-llama", "umim-docs-gpt2"])
def test_threads_that_load_at_once_get_the_same_whole_model(name: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(load_backbone, [name] * 6))
    assert len({backbone.fingerprint for backbone in found}) == 1
