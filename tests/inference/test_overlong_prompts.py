"""Prompts beyond the backbone's context: refused, cut on the left, or positions that go on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.tiny_models import SIZES
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import UnitPositions
from umim_core.errors import GenerationError

NEW, CONTEXT = 5, 64
VOCAB_SIZE = SIZES["vocab_size"]
BOS = VOCAB_SIZE - 1
LETTERS = range(1, BOS)
ROOM = CONTEXT - NEW + 1


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(3).integers(1, BOS, length).tolist()


def with_rules(backbone: Backbone, positions: UnitPositions = "compact") -> UMIM:
    spans = [(a, b) for a in LETTERS for b in LETTERS[::2]]
    return UMIM(
        backbone, Checkpoint.of(fresh_model(backbone, spans, 0.2, unit_positions=positions))
    )


def test_an_overlong_prompt_is_refused_with_what_to_do(tiny_backbone: Backbone) -> None:
    with pytest.raises(GenerationError, match="overlong='truncate'"):
        with_rules(tiny_backbone).generate(ids_of(ROOM + 1), merge="none", max_new_tokens=NEW)


def test_without_merging_the_last_tokens_are_kept(tiny_backbone: Backbone) -> None:
    umim, ids = with_rules(tiny_backbone), ids_of(150)
    options = {"merge": "none", "max_new_tokens": NEW, "overlong": "truncate"}
    output = umim.generate(ids, **options)
    assert list(output.prompt_ids[0]) == ids[-ROOM:]
    assert output == umim.generate(ids[-ROOM:], **options)
    assert umim.generate(ids[:9], **options).prompt_ids[0] == tuple(ids[:9])


@pytest.mark.parametrize("positions", ["compact", "preserved"])
def test_leading_units_are_dropped_whole(tiny_llama: Backbone, positions: UnitPositions) -> None:
    umim, ids = with_rules(tiny_llama, positions), ids_of(150)
    output = umim.generate([ids, ids[:8]], merge="all", max_new_tokens=NEW, overlong="truncate")
    kept = list(output.prompt_ids[0])
    assert kept == ids[-len(kept) :]
    starts, lengths = umim.matcher.segment(np.array(ids))
    assert len(ids) - len(kept) in starts.tolist()
    after = umim.matcher.segment(np.array(kept))[1].tolist()
    assert after == lengths[-len(after) :].tolist() and max(after) > 1
    assert (len(after) if positions == "compact" else len(kept)) in (ROOM, ROOM - 1)
    assert (len(kept) > ROOM) == (positions == "compact")
    assert output.prompt_ids[1] == tuple(ids[:8])
    assert output.ids[0] == umim.generate(kept, merge="all", max_new_tokens=NEW).ids[0]


def test_a_bos_in_front_stays(
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> None:
    tokenizer = word_tokenizer(["<eos>", *(f"w{i}" for i in range(1, VOCAB_SIZE))])
    tokenizer.bos_token = f"w{BOS}"
    ids = [BOS, *ids_of(150)]
    output = with_rules(wrap_backbone(tiny_model("llama", 0), tokenizer)).generate(
        ids, merge="none", max_new_tokens=NEW, overlong="truncate"
    )
    assert list(output.prompt_ids[0]) == [BOS, *ids[-ROOM + 1 :]]


def test_new_tokens_that_leave_no_room_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(GenerationError, match="64 positions"):
        with_rules(tiny_llama).generate([1, 2], max_new_tokens=CONTEXT + 1, overlong="truncate")
