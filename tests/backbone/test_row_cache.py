"""The row cache: what attention sees, writes per row, rollback without a copy, growth."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from umim_core.backbone.attention_masks import step_mask
from umim_core.backbone.row_cache import RowCache


def states(*values: float) -> Tensor:
    """Key states [B, 1, 1, 1], one number per row."""
    return torch.tensor(values)[:, None, None, None]


def write(cache: RowCache, *values: float) -> Tensor:
    """Write one unit per row; return the key columns attention sees [B, view]."""
    cache.begin(1)
    keys, _ = cache.update(states(*values), states(*values), 0)
    cache.commit(torch.ones(len(values)))
    return keys[:, 0, :, 0]


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_what_lists_would(seed: int) -> None:
    """Units are gained, taken back and dropped, and rows are copied, in any order."""
    rng, most = random.Random(seed), 150
    cache, held, number = RowCache(2, 3, most), [[0.0] * 0 for _ in range(3)], 0
    for _ in range(60):
        rows, longest = len(held), max(map(len, held))
        action = rng.choice(["write"] * 5 + ["rollback", "drop", "copy"])
        if action == "write" and longest < most:
            width = rng.randint(1, min(9, most - longest))
            new = number + 1.0 + torch.arange(rows * width).view(rows, 1, width, 1)
            number += rows * width
            counts = [rng.randint(0, width) for _ in range(rows)]
            cache.begin(width)
            for layer in range(2):
                keys, values = cache.update(new + layer, -new, layer)
                for b, known in enumerate(held):
                    seen = [*known, *new[b].flatten().tolist()]
                    assert (keys[b].flatten() - layer)[: len(seen)].tolist() == seen
                    assert (-values[b].flatten())[: len(seen)].tolist() == seen
            cache.commit(torch.tensor(counts))
            for b, count in enumerate(counts):
                held[b] = [*held[b], *new[b, 0, :count, 0].tolist()]
        elif action == "rollback":
            counts = [rng.randint(0, min(9, len(known))) for known in held]
            cache.rollback(torch.tensor(counts))
            held = [known[: len(known) - counts[b]] for b, known in enumerate(held)]
        elif action == "drop":
            gone = [sorted(rng.sample(range(len(k)), min(len(k), rng.randint(0, 3)))) for k in held]
            cache.drop(gone)
            for b, columns in enumerate(gone):
                held[b] = [value for i, value in enumerate(held[b]) if i not in columns]
        elif action == "copy" and number:
            chosen = [rng.randrange(rows) for _ in range(rng.randint(1, 3))]
            cache = RowCache.of_rows([(cache, row) for row in chosen])
            held = [held[row] for row in chosen]
        assert cache.lengths.tolist() == [len(known) for known in held]
    assert number > 150 or max(map(len, held)) == most


def test_no_row_gives_back_more_than_it_holds_and_none_grows_beyond_what_is_allowed() -> None:
    cache = RowCache(1, 2, max_length=3)
    write(cache, 1.0, 2.0)
    with pytest.raises(AssertionError):
        cache.begin(3)
    cache.begin(2)
    with pytest.raises(AssertionError):
        cache.update(states(1.0, 2.0), states(1.0, 2.0), 0)
    with pytest.raises(AssertionError):
        cache.rollback(torch.tensor([0, 2]))


def test_rollback_moves_and_clears_no_state() -> None:
    cache = RowCache(1, 2, max_length=8)
    for value in (1.0, 2.0, 3.0):
        write(cache, value, 10 * value)
    before, address = cache.layers[0].keys.clone(), cache.layers[0].keys.data_ptr()
    cache.rollback(torch.tensor([2, 1]))
    assert cache.lengths.tolist() == [1, 2]
    assert torch.equal(cache.layers[0].keys, before)
    assert cache.layers[0].keys.data_ptr() == address


def test_mask_hides_what_lies_behind_a_rows_own_units() -> None:
    cache = RowCache(1, 3, max_length=8)
    for _ in range(3):
        write(cache, 1.0, 1.0, 1.0)
    cache.rollback(torch.tensor([0, 2, 1]))
    cache.begin(1)
    mask = step_mask(cache, torch.float32)
    assert mask is not None and mask.shape == (3, 1, 1, 4) and mask.dtype == torch.float32
    assert (mask[:, 0, 0] == 0).int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert cache.plan.columns.tolist() == [[3], [1], [2]]
    cache.begin(2)  # several units of a row see each other causally
    mask = step_mask(cache, torch.float64)
    assert mask is not None and mask.dtype == torch.float64
    assert (mask[:2, 0] == 0).int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
    ]


def test_a_cache_that_could_not_grow_goes_on_as_it_was() -> None:
    cache = RowCache(1, 1, max_length=2**50)  # beyond any machine's address space
    write(cache, 1.0)
    with pytest.raises(RuntimeError, match="memory"):
        cache.layers[0].reserve(2**50)
    for _ in range(64):
        write(cache, 2.0)
    assert write(cache, 3.0).tolist() == [[1.0, *[2.0] * 64, 3.0]]


def test_a_cache_made_in_inference_mode_goes_on_outside_it() -> None:
    with torch.inference_mode():
        cache = RowCache(1, 2, max_length=8)
        write(cache, 1.0, 10.0)
        cache.rollback(torch.tensor([0, 1]))
        copied = RowCache.of_rows([(cache, row) for row in (0, 0, 1, 1)])
    assert write(cache, 2.0, 20.0).tolist() == [[1.0, 2.0], [20.0, 0.0]]
    assert write(copied, 2.0, 3.0, 4.0, 5.0).tolist() == [[1, 2], [1, 3], [4, 0], [5, 0]]
