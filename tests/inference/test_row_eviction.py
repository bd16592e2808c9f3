"""Generation while old spans leave the cache, against one masked forward from scratch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.engine_matrix import SAMPLED, build, module_for, random_prompts, random_rules, settings
from support.merged_models import random_merged_model
from support.pairwise import pairwise
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

NAMES = ("llama", "gpt2", "gpt-neox")


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


@pairwise(name=NAMES, age=[0, 4], infix_free=[True, False], rows=[1, 4])
@torch.no_grad()
def test_every_step_equals_a_masked_forward(
    name: str, age: int, infix_free: bool, rows: int
) -> None:
    backbone, matcher = build(name), random_rules(3, infix_free)
    prompts = random_prompts(5, rows)
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

    output = Engine(MergedModel(backbone, module_for(backbone), matcher, "compact")).generate(
        prompts,
        settings(12, **SAMPLED, merge="none", span_eviction=age, seed=0, observer=compare),
    )
    assert everything > 0
    assert all(row.token_reduction == 0 and not row.generated_spans for row in output.rows)


@torch.no_grad()
def test_a_row_that_ended_leaves_the_others_as_they_are() -> None:
    backbone, matcher = build("llama"), random_rules(3, False)
    prompts, engine = (
        random_prompts(5, 4),
        Engine(MergedModel(backbone, module_for(backbone), matcher, "compact")),
    )
    options = settings(12, merge="none", span_eviction=0, seed=0)
    whole = engine.generate(prompts, options).rows
    ends = int(whole[0].ids[2])
    ended = settings(12, merge="none", span_eviction=0, seed=0, eos_token_id=ends)
    found = engine.generate(prompts, ended).rows
    sizes = []
    for row, prompt, free in zip(found, prompts, whole, strict=True):
        size = next((n for n, x in enumerate(free.ids, 1) if x == ends), len(free.ids))
        assert list(row.ids) == list(free.ids[:size])
        (alone,) = engine.generate([prompt], ended).rows
        assert row.cache_lengths == alone.cache_lengths
        sizes.append(size)
    assert min(sizes) < max(sizes)


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
