"""Cache memory and batch capacity: bytes against real buffers, entries against the rules."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from benchmarks import cache_capacity
from benchmarks.cache_capacity import allocated_bytes, capacity, entries, main, measure, unit_bytes
from docs.make.results import benchmark_figure, benchmark_page
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.row_cache import RowCache
from umim_core.errors import NumericalError
from umim_core.inference import unit_cache

PROMPT = [1, 2, 9, 3, 4, 5, 6, 7, 8, 9]  # 4 units
SVG = "{http://www.w3.org/2000/svg}"


def test_an_entry_takes_what_transformers_cache_holds_per_token(tiny_backbone: Backbone) -> None:
    cache = DynamicCache()
    with torch.no_grad():
        tiny_backbone.model(input_ids=torch.ones(3, 7, dtype=torch.int64), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert unit_bytes(tiny_backbone) == held / (3 * 7)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 70), (3, 200)])
def test_buffers_take_rows_times_entries(tiny_backbone: Backbone, rows: int, columns: int) -> None:
    expected = rows * columns * unit_bytes(tiny_backbone)
    assert allocated_bytes(tiny_backbone, rows, columns) == expected


def test_capacity_is_the_most_rows_that_stay_within_the_budget(tiny_llama: Backbone) -> None:
    row = allocated_bytes(tiny_llama, 1, 70)
    assert capacity(tiny_llama, 70, 3 * row) == (3, 3 * row)
    assert capacity(tiny_llama, 70, 3 * row - 1) == (2, 2 * row)
    assert capacity(tiny_llama, 70, row - 1) == (0, 0)


def test_buffers_that_disagree_are_told(
    tiny_llama: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_capacity, "unit_bytes", lambda _: unit_bytes(tiny_llama) // 2)
    with pytest.raises(NumericalError, match="must fit into"):
        capacity(tiny_llama, 70, 1 << 20)


def test_entries_are_the_most_that_a_row_held(tiny_umim: UMIM) -> None:
    prompts = [np.array(PROMPT), np.array([2, 1, 1, 3])]
    assert entries(tiny_umim, prompts, "none", 5, 2)[0] == [len(PROMPT) + 4, 4 + 4]
    assert entries(tiny_umim, prompts, "prompt", 5, 1)[0] == [4 + 4, 4 + 4]


@pytest.mark.parametrize(("merge", "limit"), [("none", 14), ("prompt", 8), ("all", 8)])
def test_the_limit_is_what_the_engine_allows_before_it_decodes(
    tiny_umim: UMIM, monkeypatch: pytest.MonkeyPatch, merge: str, limit: int
) -> None:
    allowed: list[int] = []

    class Watched(RowCache):
        def __init__(self, *sizes: int, **options: object) -> None:
            super().__init__(*sizes, **options)  # type: ignore[arg-type]
            allowed.append(self.max_length)

    monkeypatch.setattr(unit_cache, "RowCache", Watched)
    prompts = [np.array(PROMPT), np.array([2, 1, 1, 3])]
    assert entries(tiny_umim, prompts, merge, 5, 2)[1] == limit
    assert allowed == [limit]


def test_a_length_beyond_the_positions_is_skipped(tiny_umim: UMIM) -> None:
    ids = np.array(PROMPT * 10)
    found = measure(
        tiny_umim, ids, lengths=[10, 60, 61], prompts=1, new_tokens=5, budget=1 << 16, batch_size=1
    )
    assert (found["positions"], found["skipped"]) == (64, [61])
    base, prompt, _ = found["rows"][:3]
    assert (base["units_longest"], prompt["units_longest"]) == (14, 8)
    assert prompt["sequences"] == (1 << 16) // (8 * found["unit_bytes"])


def test_rows_at_the_limit_do_not_profit_from_merges_while_decoding(tiny_umim: UMIM) -> None:
    budget = 64 * unit_bytes(tiny_umim.backbone)
    given = {"prompts": 1, "new_tokens": 17, "budget": budget, "batch_size": 1}
    found = measure(tiny_umim, np.array(PROMPT), lengths=[10], **given)  # type: ignore[arg-type]
    rows = {row["merge"]: row for row in found["rows"]}
    limits = {merge: (row["units_limit"], row["sequences_limit"]) for merge, row in rows.items()}
    assert limits == {"none": (26, 2), "prompt": (20, 3), "all": (20, 3)}
    for row in rows.values():
        taken = row["units_limit"] * row["sequences_limit"] * found["unit_bytes"]
        assert row["allocated_bytes_limit"] == taken


def test_a_tiny_run_writes_results_page_and_figure(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(f"w{token}" for token in PROMPT * 9)]
    monkeypatch.setattr(cache_capacity, "held_out_texts", lambda cache: texts)
    out = tmp_path / "cache_capacity.json"
    options = ["--checkpoints", tiny_checkpoint, "--lengths", 10, 20, 500, "--prompts", 2]
    options += ["--new-tokens", 4, "--budget-mib", 1, "--out", out]
    assert main([str(option) for option in options]) == 0
    report = json.loads(out.read_text("utf-8"))
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(report) and "no prompts of 500 tokens" in page
    for column in ("rows at the final length", "rows at the engine's own limit"):
        assert f"| {column} |" in page
    svg = out.with_suffix(".svg").read_text("utf-8")
    assert svg.startswith(benchmark_figure(report))
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314  # our own
    assert {"base", "UMIM, prompt", "Rows", "20"} <= set(texts)
