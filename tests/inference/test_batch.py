"""Rows that come and go, units of what they generate, kept columns, columns that age out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numba import typeof

from support.engine_matrix import (
    SAMPLED,
    VOCAB,
    build,
    merging_engine,
    module_for,
    random_prompts,
    random_rules,
    settings,
)
from support.merged_models import random_merged_model
from support.pairwise import pairwise
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.errors import GenerationError
from umim_core.inference import prefix_store
from umim_core.inference.batch import NO_RULES, Batch
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward, Row
from umim_core.inference.prefix_store import PrefixStore
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher, PromptIds
from umim_core.rules.ruleset import RuleSet

SIZES = ((9, 12), (17, 5), (3, 20), (11, 1), (24, 9))
STORE = 1 << 24


def engine_of(kind: Any) -> Engine:
    """Merged at the input in compact or preserved positions, or with adapters behind a layer."""
    backbone, rules = build("llama"), random_rules(0, False)
    if kind == "inside":
        return Engine(random_merged_model(backbone, rules, 1, 2))
    return merging_engine(backbone, rules, kind)


def prompts(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, size) for size, _ in SIZES]


def model_columns(columns: int) -> tuple[UnitCache, int]:
    """A row of so many columns."""
    batch = Batch(engine_of("compact"), PrefixStore(0))
    batch.join([np.ones(columns, dtype=np.int64)], settings(1, merge="none"))
    return batch._requests[0].places[0]


def units_of(ids: np.ndarray, starts: np.ndarray) -> list[bytes]:
    return [part.tobytes() for part in np.split(ids, starts[1:])]


def drive(batch: Batch, waiting: list[tuple]) -> list[list[Row]]:
    """Let requests join one by one, two steps apart, until all rows have ended."""
    joined: list[list[Row]] = []
    while waiting or batch.rows:
        if waiting:
            joined.append(batch.join([waiting[0][0]], waiting.pop(0)[1]))
        for _ in range(2):
            if batch.rows:
                batch.step()
    return joined


@pytest.mark.parametrize("merge", ["all", "prompt", "none"])
@pytest.mark.parametrize("kind", ["compact", "preserved", "inside"])
def test_rows_that_come_and_go_get_the_tokens_of_a_request_alone(kind: str, merge: str) -> None:
    request = GenerateOptions(merge=merge, raw_tail=0, seed=3)
    engine, ids = engine_of(kind), prompts(1)
    batch = Batch(engine, PrefixStore(STORE))
    waiting = [(ids[b], replace(request, max_new_tokens=new)) for b, (_, new) in enumerate(SIZES)]
    for rows, prompt, (_, new) in zip(drive(batch, waiting), ids, SIZES, strict=True):
        [live], options = rows, replace(request, max_new_tokens=new)
        [row] = engine.generate([prompt], options).rows
        assert (live.ids, live.stop_reason) == (row.ids, row.stop_reason)


def test_rows_that_leave_early_leave_the_others_as_they_are() -> None:
    """Of two requests, one with samples: those that stay are those of the engine."""
    engine, prompt = engine_of("compact"), prompts(2)
    options = settings(8, do_sample=True, num_return_sequences=3, seed=11)
    batch = Batch(engine_of("compact"), PrefixStore(STORE))
    samples, (single,) = batch.join([prompt[0]], options), batch.join([prompt[1]], settings(9))
    for step in range(8):
        if step == 3:
            batch.leave([samples[1], single])
            batch.leave([samples[1], single])  # twice is once
        batch.step()
    alone = engine.generate([prompt[0]], options).rows
    assert (samples[0], samples[2]) == (alone[0], alone[2])
    assert samples[1].ids == alone[1].ids[:3]
    assert single.ids == engine.generate([prompt[1]], settings(9)).rows[0].ids[:3]
    assert len({row.ids for row in alone}) == 3 and not batch.rows


def test_rows_that_evict_run_beside_rows_that_merge_and_are_not_kept() -> None:
    engine = engine_of("compact")
    requests = [
        (np.array([0, 3, 0, 6, 0, 1, 2, 3]), settings(12, merge="none", span_eviction=0)),
        (prompts(2)[1], settings(12, merge="all", logprobs=2)),
    ]
    batch = Batch(engine, PrefixStore(STORE))
    together = [row for rows in drive(batch, list(requests)) for row in rows]
    alone = [engine.generate([ids], options).rows[0] for ids, options in requests]
    for row, other in zip(together, alone, strict=True):
        assert (row.ids, row.cache_lengths) == (other.ids, other.cache_lengths)
        assert row.generated_spans == other.generated_spans
    assert together[1].logprobs == pytest.approx(alone[1].logprobs, abs=1e-9)
    assert together[0].dropped == alone[0].dropped > 0
    assert batch.join([requests[0][0]], settings(2, merge="none"))[0].reused == 0


@pytest.mark.parametrize("kind", ["compact", "preserved", "inside"])
def test_a_chat_that_goes_on_evaluates_only_what_is_new(kind: str) -> None:
    request = GenerateOptions(max_new_tokens=4, merge="prompt", raw_tail=2)
    engine = engine_of(kind)
    batch, rng = Batch(engine, PrefixStore(STORE)), np.random.default_rng(5)
    said: list[int] = []
    parts: list[tuple[int, int]] = []
    held = 0
    for turn in range(4):
        new = rng.integers(1, VOCAB, 9).tolist()
        parts.append((len(said), len(said) + len(new)))
        said += new
        prompt = PromptIds(np.array(said), tuple(parts))
        (live,) = drive(batch, [(prompt, request)])[0]
        assert live.ids == engine.generate([prompt], request).rows[0].ids
        # All but the reply's last token, which was never fed.
        assert live.reused == held, f"turn {turn}"
        assert live.prompt_units - live.reused <= len(new) + 1
        held = live.prompt_units + len(live.ids) - 1
        said += live.ids


def test_what_is_kept_is_bounded_the_oldest_goes_and_what_is_larger_pushes_nothing_out() -> None:
    engine, request = engine_of("compact"), settings(2, merge="none")
    ids, starts = [np.full(30, number) for number in range(1, 9)], np.arange(30)
    probe = PrefixStore(STORE)
    drive(Batch(engine, probe), [(ids[0], request)])
    for kept in (3, 1):
        store = PrefixStore(kept * probe.bytes)
        drive(Batch(engine, store), [(row, request) for row in ids])
        larger = np.full(min(40 * kept, 95), 8)  # goes on from the last one
        drive(Batch(engine, store), [(larger, settings(2, merge="none"))])
        assert store.bytes == kept * probe.bytes
        found = [store.find(row, starts) is not None for row in ids]
        assert found == [False] * (8 - kept) + [True] * kept


class Unseen(OrderedDict[int, object]):
    """Rows that may be looked up by number, and not gone through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all rows are gone through")


def test_a_look_up_goes_through_no_rows_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, place = PrefixStore(STORE), model_columns(3)
    for pair in product(range(VOCAB), repeat=2):
        store.put(np.array(pair), np.arange(2), place)
    assert len(store._prefixes) == VOCAB**2
    monkeypatch.setattr(store, "_prefixes", Unseen(store._prefixes))
    found = store.find(np.array([1, 2, 3]), np.arange(3))
    assert found is not None and found.lengths.tolist() == [2]
    assert store.find(np.array([VOCAB, 1]), np.arange(2)) is None
    monkeypatch.undo()
    monkeypatch.setattr(prefix_store, "MOST_ROWS", 20)
    store.put(np.array([1, 2, 3]), np.arange(3), place)
    assert len(store._prefixes) == 20
    store.clear()
    assert not store._newest


def test_the_store_finds_what_comparing_all_rows_finds() -> None:
    """Against the plain search over all kept rows, the ones used last, at every look-up."""
    rng, place = np.random.default_rng(0), model_columns(12)
    store, kept = PrefixStore(40 * UnitCache.of_rows([place]).bytes), list[list[bytes]]()
    for _ in range(400):
        ids = rng.integers(0, 2, rng.integers(1, 12))
        cuts = rng.random(len(ids)) < 0.8
        starts = np.flatnonzero([True, *cuts[1:]])
        units, found = units_of(ids, starts), store.find(ids, starts)
        begins = [n for n in range(len(units)) for one in kept if one[:n] == units[:n]]
        assert (0 if found is None else int(found.lengths[0])) == max(begins, default=0)
        store.put(ids, starts, place)
        kept = [units_of(one.ids, one.starts) for one in store._prefixes]
        assert units in kept or any(one[: len(units)] == units for one in kept)
        assert not any(a is not b and b[: len(a)] == a for a in kept for b in kept)


def test_a_row_that_cannot_be_or_go_on_fails_alone() -> None:
    engine, ids = engine_of("compact"), prompts(8)
    batch = Batch(engine, PrefixStore(STORE))
    (bad,), (good,) = (batch.join([ids[b]], settings(3)) for b in (0, 1))
    with pytest.raises(GenerationError, match="positions"):
        batch.join([np.ones(95, dtype=np.int64)], settings(6, merge="none"))
    with pytest.raises(GenerationError, match="ids must lie"):
        batch.join([np.array([VOCAB])], settings(6))
    batch._requests[0].logits.fill_(torch.nan)
    while batch.rows:
        batch.step()
    assert bad.error is not None and "finite score" in str(bad.error)
    assert good.ids == engine.generate([ids[1]], settings(3)).rows[0].ids


def test_an_error_is_of_the_rows_that_run_and_ends_the_request() -> None:
    engine, ids = engine_of("compact"), prompts(8)[:2]

    def fail(raw_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if raw_ids.shape[1] == len(ids[1]) + 2:
            raise ValueError("a processor's own")
        return scores

    first = engine.generate(ids, settings(1)).rows[0].ids[0]
    options = settings(4, eos_token_id=first, logits_processor=[fail])
    batch = Batch(engine)
    well, bad = batch.join(ids, options)
    while batch.rows:
        batch.step()
    assert (well.ids, well.stop_reason, well.error) == ((first,), "eos", None)
    assert len(bad.ids) == 2 and "a processor's own" in str(bad.error)
    with pytest.raises(GenerationError, match="a processor's own"):
        engine.generate(ids, options)


@pytest.mark.parametrize("kind", ["compact", "preserved"])
@pytest.mark.parametrize("tokens", [3, 90, 96])
def test_a_row_that_may_be_shorter_gets_the_tokens_that_there_is_room_for(
    kind: str, tokens: int
) -> None:
    ids = np.random.default_rng(tokens).integers(0, VOCAB, tokens)
    batch = Batch(engine_of(kind))
    (row,) = batch.join([ids], settings(200), shorten=True)
    while batch.rows:
        batch.step()
    held = tokens if kind == "preserved" else row.prompt_units
    assert len(row.ids) == 96 - held + 1  # the last token is never fed


def test_the_loop_over_rules_is_compiled_once_with_rules_and_without() -> None:
    rules = Matcher(RuleSet.from_spans([(1, 2)]))
    assert typeof(NO_RULES) == typeof(rules.suffixes(1)._slots)


def hidden_columns(
    prompt: np.ndarray, generated: list[int], read: int, age: int, matcher: Matcher
) -> list[int]:
    """Columns that are gone once ``read`` tokens were read, of a prompt that was read whole."""
    last, border = read - 1, len(prompt)
    gone = []
    for start, length in zip(*matcher.segment(prompt), strict=True):
        if last - (start + length - 1) >= age:
            gone += range(max(start, 1), start + length - 1)
    made = np.array(generated[: read - border], dtype=np.int64)
    for start, length in zip(*matcher.segment(made), strict=True):
        first = border + start
        if last - (first + length - 1) >= age and last - first >= 3:
            gone += range(first, first + length - 1)
    return gone


@pairwise(name=["llama", "gpt2", "gpt-neox"], age=[0, 4], infix_free=[True, False], rows=[1, 4])
@torch.no_grad()
def test_every_step_equals_a_masked_forward(
    name: str, age: int, infix_free: bool, rows: int
) -> None:
    backbone, matcher, prompts = build(name), random_rules(3, infix_free), random_prompts(5, rows)
    everything = 0

    def compare(forward: Forward) -> None:
        nonlocal everything
        for b, prompt in enumerate(prompts):
            if not forward.running[b]:
                continue
            made = list(forward.generated[b])
            ids = np.array([*prompt, *made], dtype=np.int64)
            seen = torch.ones(len(ids), len(ids)).tril().bool()
            for query in range(len(prompt), len(ids)):
                seen[query, hidden_columns(prompt, made, query, age, matcher)] = False
            lowest = torch.finfo(torch.float64).min
            mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)
            states = backbone.hidden(backbone.embed(torch.from_numpy(ids))[None], mask[None, None])
            assert float((forward.logits[b] - backbone.head(states[0, -1:])[0]).abs().max()) < 1e-5
            gone = hidden_columns(prompt, made, len(ids), age, matcher)
            assert forward.lengths[b] == len(ids) - len(gone)
            everything += len(gone)

    ends = {"eos_token_id": [1, 3]} if rows > 1 else {}
    output = Engine(MergedModel(backbone, module_for(backbone), matcher)).generate(
        prompts,
        settings(12, **SAMPLED, **ends, merge="none", span_eviction=age, seed=0, observer=compare),
    )
    assert everything > 0
    assert all(row.token_reduction == 0 and not row.generated_spans for row in output.rows)
    assert (len({len(row.ids) for row in output.rows}) > 1) == (rows > 1)  # at other steps
    assert all(len(row.cache_lengths) == len(row.ids) for row in output.rows)


def test_samples_of_a_prompt_lose_their_own_columns(tiny_umim: UMIM) -> None:
    options = {"merge": "none", "span_eviction": 0, "do_sample": True, "seed": 0}
    prompt = "w1 w2 w9 w3 w4 w5"
    out = tiny_umim.generate(prompt, n=3, max_new_tokens=6, **options)
    assert [lengths[0] for lengths in out.cache_lengths] == [4, 4, 4]
    whole = tiny_umim.generate(prompt, n=3, max_new_tokens=6, **{**options, "span_eviction": 99})
    assert [lengths[0] for lengths in whole.cache_lengths] == [6, 6, 6]
    plain = tiny_umim.generate(prompt, n=3, max_new_tokens=6, merge="none", do_sample=True, seed=0)
    assert whole.ids == plain.ids
    assert "; merge none, span eviction 0: " in out.views[0].summary
    dropped = 11 - out.cache_lengths[0][-1]  # six tokens of the prompt, five that were fed
    assert f"{dropped} of 11 columns dropped" in out.views[0].summary
    assert "eviction" not in plain.views[0].summary


@pytest.mark.parametrize("merge", ["none", "all"])
def test_below_the_merge_depth_dropped_columns_are_those_of_raw_tokens(merge: Merge) -> None:
    matcher, prompts = random_rules(1, True), random_prompts(3, 2)
    engine = Engine(random_merged_model(build("llama"), matcher, 1, 0))
    out = engine.generate(prompts, settings(12, merge=merge, span_eviction=0))
    gone = [
        hidden_columns(prompt, list(row.ids), len(prompt) + 11, 0, matcher)
        for prompt, row in zip(prompts, out.rows, strict=True)
    ]
    dropped = [row.dropped for row in out.rows]
    assert dropped == list(map(len, gone))
    assert min(dropped) > 0


def test_an_evicted_state_is_not_continued(tiny_umim: UMIM) -> None:
    out = tiny_umim.generate("w1 w2 w9", merge="none", span_eviction=0, max_new_tokens=3)
    with pytest.raises(GenerationError, match="spans were evicted from it"):
        tiny_umim.generate("w5", merge="none", max_new_tokens=3, past=out.state)
    plain = tiny_umim.generate("w1 w2 w9", merge="none", max_new_tokens=3)
    with pytest.raises(GenerationError, match="span eviction needs a cache of its own"):
        tiny_umim.generate("w5", merge="none", span_eviction=0, max_new_tokens=3, past=plain.state)
    assert tiny_umim.generate("w5", merge="none", max_new_tokens=3, past=plain.state).ids
