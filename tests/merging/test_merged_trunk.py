"""Merging inside the model: exact splits, units and adapters, against an oracle that uses hooks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import build, random_prompts, random_rules, settings
from support.family_configs import EXACT
from support.family_configs import random_model as model_of_family
from support.merged_models import cuts_of, oracle_states, random_merged_model
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.split import split_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import UnitPositions
from umim_core.errors import BackboneError
from umim_core.inference.engine import Engine
from umim_core.merging.adapters import SpanAdapters, adapted, linear_maps, merged_rows
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import score_rows, token_log_probs
from umim_core.merging.low_rank_rows import add_low_rank
from umim_core.merging.merged_model import MergedModel, MergedTrunk

FORMS = [(1, 0), (1, 3), (0, 3)]
UNSPLIT = {"biogpt", "granite-unscaled", "opt", "xglm"}  # not exactly: refused by name


@pytest.mark.parametrize("family", sorted(EXACT))
def test_the_parts_of_every_family_give_the_whole_or_are_refused(family: str) -> None:
    backbone = wrap_backbone(model_of_family(EXACT[family]), None)
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    ids = torch.arange(6)[None] + 1
    try:
        lower, upper = split_backbone(backbone, 1)
    except BackboneError as error:
        assert type(backbone.model).__name__ in str(error)
        assert family in UNSPLIT
        return
    assert family not in UNSPLIT
    embeddings = backbone.embed(ids)
    parts = upper.hidden(lower.hidden(embeddings))
    assert torch.allclose(parts, backbone.hidden(embeddings), atol=1e-5)
    assert lower.num_layers + upper.num_layers == backbone.num_layers
    shared = {p.data_ptr() for p in backbone.model.parameters()}
    assert {p.data_ptr() for p in upper.model.parameters()} <= shared  # no weight is copied
    assert all(torch.equal(before[n], v) for n, v in backbone.model.state_dict().items())


@pytest.mark.parametrize(("rank", "longest"), [(0, 4), (3, 4), (3, 9)])
def test_perplexity_passes_through_the_states_of_decoding(rank: int, longest: int) -> None:
    backbone, matcher = build("llama"), random_rules(3, False, longest)
    model = random_merged_model(backbone, matcher, 1, rank, rows=20)
    rows = random_prompts(11, 3, 11 if longest == 4 else 2)
    for ids, scores in zip(rows, token_log_probs(rows, model), strict=True):
        for t in range(len(ids) - 1):
            known = ids[: t + 1].tolist()
            units = cuts_of(matcher, known)
            logits = backbone.head(oracle_states(model, known, units)[-1])
            assert torch.isclose(scores[t], logits.log_softmax(-1)[ids[t + 1]], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("depth", "rank", "positions"), [*((*form, "preserved") for form in FORMS), (0, 3, "compact")]
)
def test_continuations_together_equal_each_alone_behind_its_context(
    depth: int, rank: int, positions: UnitPositions, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_merged_model(
        build("llama"), random_rules(3, False), depth, rank, positions=positions
    )
    contexts = random_prompts(4, 3)
    endings = [[np.array([1, 2, 3]), np.array([4, 5])], [np.array([6, 7, 1, 2])], [np.array([3])]]
    together = score_continuations(contexts, endings, model)
    # One continuation per row needs no mask of columns.
    monkeypatch.delattr("umim_core.merging.continuations.block_mask")
    firsts = score_continuations(contexts, [row[:1] for row in endings], model)
    for context, row_endings, scored, [first] in zip(
        contexts, endings, together, firsts, strict=True
    ):
        assert torch.allclose(scored[0].log_probs, first.log_probs, rtol=0, atol=1e-10)
        for ending, scores in zip(row_endings, scored, strict=True):
            alone = score_continuations([context], [[ending]], model)[0][0]
            assert torch.allclose(scores.log_probs, alone.log_probs, rtol=0, atol=1e-10)
            assert torch.equal(scores.greedy, alone.greedy)
            if depth:
                ids = [*context.tolist(), *ending[:-1].tolist()]
                units = cuts_of(model.require_matcher(), context)
                units += [(len(context) + k, 1) for k in range(len(ending) - 1)]
                states = oracle_states(model, ids, units)[len(units) - len(ending) :]
                expected = model.backbone.head(states).log_softmax(-1)
                exact = expected[torch.arange(len(ending)), torch.from_numpy(ending)]
                assert torch.allclose(scores.log_probs, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("depth", [0, 1])
def test_continuations_that_a_row_has_no_room_for_stand_in_others(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-Neo counts windows by columns: whatever stood beyond 16 saw less of its context."""
    backbone = random_backbone("gpt_neo", torch.float64, window_size=16)
    model = random_merged_model(backbone, random_rules(3, False), depth, 0)
    contexts = [ids[:9] for ids in random_prompts(4, 2)]
    endings = [[np.array([a, 5, 6, a]) for a in range(1, 9)], [np.array([7, 8])]]
    hidden, rows = MergedTrunk.hidden, list[int]()

    def noted(trunk: MergedTrunk, units: Tensor, *rest: Any) -> Tensor:
        rows.append(len(units))
        return hidden(trunk, units, *rest)

    monkeypatch.setattr(MergedTrunk, "hidden", noted)
    together = score_continuations(contexts, endings, model, [None, None])
    assert len(rows) > 1 and max(rows) == len(contexts)
    for context, row, scored in zip(contexts, endings, together, strict=True):
        assert len(scored) == len(row)
        for ending, scores in zip(row, scored, strict=True):
            alone = score_continuations([context], [[ending]], model)[0][0]
            assert torch.allclose(scores.log_probs, alone.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("depth", "rank"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_positions_have_the_bits_of_the_base_model(
    depth: int, rank: int, dtype: torch.dtype
) -> None:
    """Without a merge a row computes what the base model computes."""
    backbone, matcher = build("llama", dtype), random_rules(1, True)
    model = random_merged_model(backbone, matcher, depth, rank)
    raw = [ids for ids in random_prompts(9, 40) if (matcher.segment(ids)[1] == 1).all()][:4]
    assert max(map(len, raw)) > 1
    base = MergedModel.without_merging(backbone)
    for ids in raw:
        own, expected = (score_rows([ids], read)[0].log_probs for read in (model, base))
        assert torch.equal(own, expected)


def random_adapters(backbone: Backbone, rank: int) -> SpanAdapters:
    adapters = SpanAdapters(linear_maps(backbone), backbone.num_layers, rank)
    draw = torch.Generator().manual_seed(0)
    adapters.initialise(draw)
    with torch.no_grad():
        for up in adapters.up.values():
            up.normal_(0.0, 0.5, generator=draw)
    return adapters


def test_adapters_change_merged_rows_and_no_other_bit() -> None:
    backbone = random_backbone("llama", torch.bfloat16)
    adapters = random_adapters(backbone, 4)
    twin = adapted(backbone, adapters)
    units = backbone.embed(torch.arange(12).view(2, 6))
    with torch.no_grad():
        plain = backbone.hidden(units)
        assert torch.equal(twin.hidden(units), plain)
        with merged_rows(torch.tensor([3, 10])):  # row 0 unit 3, row 1 unit 4
            changed = twin.hidden(units)
    assert torch.equal(changed[0, :3], plain[0, :3])
    assert torch.equal(changed[1, :4], plain[1, :4])
    assert not torch.equal(changed[0, 3], plain[0, 3])
    assert not torch.equal(changed[1, 4], plain[1, 4])
    assert torch.equal(backbone.hidden(units), plain)  # the backbone has no hooks
    wide = adapted(random_backbone("llama"), adapters)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), merged_rows(torch.tensor([3, 10])):
        assert torch.allclose(wide.hidden(units.float()), changed.float(), atol=0.1)


def test_threads_have_gates_of_their_own() -> None:
    backbone = random_backbone("llama")
    adapters = random_adapters(backbone, 2)
    twin, units = adapted(backbone, adapters), backbone.embed(torch.arange(6)[None])

    @torch.no_grad()
    def read(row: int) -> torch.Tensor:
        with merged_rows(torch.tensor([row])):
            return twin.hidden(units)

    alone = [read(row) for row in range(6)]
    with ThreadPoolExecutor(6) as pool:
        again = pool.map(read, list(range(6)) * 20)
    assert all(map(torch.equal, again, alone * 20))


@pytest.mark.parametrize("longest", [4, 9])
def test_a_checkpoint_keeps_depth_and_adapters(tmp_path: Path, longest: int) -> None:
    backbone, matcher = build("llama", torch.float32), random_rules(1, True, longest)
    model = random_merged_model(backbone, matcher, 1, 3, rows=5)
    with torch.no_grad():  # numbers that bfloat16 holds
        for weight in model.require_module().parameters():
            weight.copy_(weight.bfloat16().float())
    Checkpoint.of(model).save(tmp_path / "saved")
    loaded = Checkpoint.load(tmp_path / "saved")
    assert loaded.module.longest == longest == loaded.rules.longest
    assert loaded.config.merge_depth == 1 and loaded.config.adapter_rank == 3
    again = MergedModel(backbone, loaded.module, matcher)
    prompts = random_prompts(2, 3, 11 if longest == 4 else 2)
    assert Engine(again).generate(prompts, settings(8)).rows == (
        Engine(model).generate(prompts, settings(8)).rows
    )
    other = build("gpt2", torch.float32)
    with pytest.raises(BackboneError, match="adapters must be of"):
        MergedModel(other, loaded.module, matcher)


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 4, 7])
def test_given_rows_gain_their_products_and_no_other_row_changes(rank: int, size: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    n, o = (10, 13) if size % 2 else (13, 10)
    x, out = (torch.randn(9, width, generator=draw).bfloat16() for width in (n, o))
    down, up = torch.randn(n, rank, generator=draw), torch.randn(rank, o, generator=draw)
    rows = torch.randperm(9, generator=draw)[:size]
    expected = out.double()
    expected[rows] += x[rows].double() @ down.double() @ up.double()
    add_low_rank(out, x, rows, down, up)
    assert torch.allclose(out.double(), expected, rtol=2**-8, atol=1e-5)
    untouched = [row for row in range(9) if row not in rows]
    assert torch.equal(out[untouched].double(), expected[untouched])
    with pytest.raises(ValueError, match="sizes or types do not fit"):
        add_low_rank(out, x.float(), rows, down, up)
    with pytest.raises(IndexError):
        add_low_rank(out, x, torch.tensor([9]), down, up)
