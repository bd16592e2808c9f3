"""Prefixes: one document is read once, for any number of questions, batches and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.merged_models import random_merged_model
from support.tiny_models import forwards_of
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError

DOCUMENT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w10 w1 w2 w11"
QUESTIONS = ["w12 w3 w4 w5 w13", "w14 w15 w1 w2 w16 w17", "w18"]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "merge": "prompt", "raw_tail": 0}


@pytest.fixture(params=["embeddings", "inside"])
def umim(request: pytest.FixtureRequest, tiny_umim: UMIM, tiny_llama: Backbone) -> UMIM:
    if request.param == "embeddings":
        return tiny_umim
    inside = random_merged_model(tiny_llama, tiny_umim.matcher, depth=1, rank=2)
    return UMIM(tiny_llama, Checkpoint.of(inside))


def test_three_questions_on_one_prefix_read_the_document_once(umim: UMIM) -> None:
    whole = [umim.generate(f"{DOCUMENT} {question}", **OPTIONS) for question in QUESTIONS]
    units = len(umim.compress(DOCUMENT).units)
    sizes = [len(umim.compress(question).units) for question in QUESTIONS]
    with forwards_of(umim.merged_model.trunk.upper.trunk) as seen:
        prefix = umim.prefix(DOCUMENT, merge="prompt")
        kept = [(layer, layer.keys.clone()) for layer in prefix.cache.units.layers]
        found = [umim.generate(question, past=prefix, **OPTIONS) for question in QUESTIONS]
        together = umim.generate(QUESTIONS, past=prefix, **OPTIONS)
        again = umim.generate(QUESTIONS[0], past=prefix, **OPTIONS)
    steps = [(1, 1)] * 5
    alone = [step for size in sizes for step in ((1, size), *steps)]
    batch = [(3, max(sizes)), *[(3, 1)] * 5]
    assert seen == [(1, units), *alone, *batch, (1, sizes[0]), *steps]
    assert [out.ids[0] for out in found] == [out.ids[0] for out in whole]
    assert together.ids == tuple(out.ids[0] for out in whole)
    assert again == found[0]
    assert all(torch.equal(layer.keys, before) for layer, before in kept)  # never written into
    assert [out.cache_lengths[0] for out in found] == [out.cache_lengths[0] for out in whole]
    assert (prefix.cache_length, len(prefix.raw_ids[0])) == (units, 14)
    assert prefix.token_reduction == pytest.approx(umim.compress(DOCUMENT).token_reduction)


def test_a_turn_goes_on_from_an_answer_behind_a_prefix(umim: UMIM) -> None:
    first = umim.generate(QUESTIONS[0], past=umim.prefix(DOCUMENT, merge="prompt"), **OPTIONS)
    turn = umim.generate(" w20 w21", past=first.state, **OPTIONS)
    whole = umim.generate(f"{DOCUMENT} {QUESTIONS[0]}", **OPTIONS)
    assert turn.ids == umim.generate(" w20 w21", past=whole.state, **OPTIONS).ids


def test_samples_and_streams_take_a_prefix(tiny_umim: UMIM) -> None:
    prefix = tiny_umim.prefix(DOCUMENT, merge="prompt")
    sampled = {"max_new_tokens": 6, "do_sample": True, "n": 2, "seed": 3, "merge": "prompt"}
    out = tiny_umim.generate(QUESTIONS[:2], past=prefix, **sampled)
    assert len(out.ids) == 4
    assert out == tiny_umim.generate(QUESTIONS[:2], past=prefix, **sampled)
    text = "".join(tiny_umim.stream(QUESTIONS[0], past=prefix, **OPTIONS))
    assert text == tiny_umim.generate(QUESTIONS[0], past=prefix, **OPTIONS).text[0]


def test_threads_share_a_model_and_a_prefix(umim: UMIM) -> None:
    """What the docstring of ``UMIM`` states: each call gives what it gives alone."""
    prefix = umim.prefix(DOCUMENT, merge="prompt")
    everywhere = OPTIONS | {"merge": "all", "max_new_tokens": 12}
    sampled = everywhere | {"do_sample": True, "seed": 5}
    calls = [
        *((question, {**OPTIONS, "past": prefix}) for question in QUESTIONS),
        *((f"{DOCUMENT} {question}", everywhere) for question in QUESTIONS),
        *((f"{question} w1 w2", sampled) for question in QUESTIONS),
    ]
    alone = [umim.generate(prompt, **options) for prompt, options in calls]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(umim.generate, prompt, **options) for prompt, options in [*calls, *calls]
        ]
        assert [job.result() for job in jobs] == [*alone, *alone]


def test_bad_prefixes_are_refused(tiny_umim: UMIM, tiny_llama: Backbone) -> None:
    for text, message in (("", "at least one token"), (["w1", "w2"], "one text or chat")):
        with pytest.raises(GenerationError, match=message):
            tiny_umim.prefix(text)
    with pytest.raises(GenerationError, match="fit the backbone's 64 positions"):
        tiny_umim.prefix("w9 " * 65)
    other = UMIM(tiny_llama, tiny_umim.checkpoint, allow_backbone_mismatch="the same weights")
    with pytest.raises(GenerationError, match="continued by the backbone"):
        other.generate("w1", past=tiny_umim.prefix(DOCUMENT))
