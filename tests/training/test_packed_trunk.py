"""Rows packed without padding get what they get alone, in every family of backbones."""

from __future__ import annotations

import sys
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import FalconConfig

from support.engine_matrix import FAMILIES, VOCAB, build
from support.merged_models import fresh_model
from support.tiny_models import forwards_of, random_backbone, random_model
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.training.packed_trunk import PackedTrunk
from umim_core.training.step import DistillModel

LENGTHS = [3, 1, 7, 1, 5]
PADDED = {"gpt-neo"}  # its attention is not looked up in the table


def embeddings(backbone: Backbone, lengths: list[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return backbone.embed(torch.randint(0, VOCAB, (sum(lengths),), generator=generator))


def alone(
    backbone: Backbone, units: Tensor, lengths: list[int], positions: Tensor | None = None
) -> Tensor:
    """Every row by itself, one after the other."""
    places = [None] * len(lengths) if positions is None else list(positions.split(lengths))
    return torch.cat(
        [
            backbone.hidden(row[None], position_ids=None if place is None else place[None])[0]
            for row, place in zip(units.split(lengths), places, strict=True)
        ]
    )


@pytest.mark.parametrize("jumps", [False, True], ids=["counted", "jumping"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_get_states_and_gradients_as_alone_and_no_padding(
    name: str, jumps: bool, torch_rng: torch.Generator
) -> None:
    backbone = build(name)
    trunk = PackedTrunk(backbone)
    units = embeddings(backbone, LENGTHS).requires_grad_()
    positions = torch.cat([torch.arange(n) * 3 + 1 for n in LENGTHS]) if jumps else None
    with forwards_of(backbone.trunk) as seen:
        found = trunk.hidden(units, LENGTHS, positions)
    assert seen == ([(5, 7)] if name in PADDED else [(1, sum(LENGTHS))])
    expected = alone(backbone, units, LENGTHS, positions)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    assert not jumps or (expected - alone(backbone, units, LENGTHS)).abs().max() > 1e-3
    weights = torch.randn(units.shape, dtype=torch.float64, generator=torch_rng)
    gradient, wanted = (
        torch.autograd.grad((x * weights).sum(), units)[0] for x in (found, expected)
    )
    torch.testing.assert_close(gradient, wanted, atol=1e-11, rtol=1e-9)


def test_rows_beyond_a_window_and_attention_that_is_not_looked_up_are_padded() -> None:
    windowed, sizes = build("mistral", sliding_window=5), {"hidden_size": 32, "vocab_size": VOCAB}
    config = FalconConfig(num_hidden_layers=2, num_attention_heads=4, alibi=False, **sizes)
    falcon = wrap_backbone(random_model(config), None)
    falcon.model.transformer.ln_f.weight.data *= 1e-3  # small states must not look alike
    for backbone, exact, close in (
        (windowed, 1e-12, 1e-6),
        (build("llama", attention="eager"), 1e-6, 1e-6),
        (falcon, 1e-8, 1e-4),
    ):
        attention = backbone.model.config._attn_implementation
        trunk = PackedTrunk(backbone)
        units = embeddings(backbone, LENGTHS)
        with forwards_of(backbone.trunk) as seen:
            found = trunk.hidden(units, LENGTHS)
            trunk.hidden(units[:4], [3, 1])
        assert seen == [(5, 7), (1, 4) if backbone is windowed else (2, 3)]
        assert backbone.model.config._attn_implementation == attention
        torch.testing.assert_close(found, alone(backbone, units, LENGTHS), atol=exact, rtol=close)


def test_the_model_keeps_its_own_attention_after_an_error() -> None:
    backbone = build("llama")
    trunk = PackedTrunk(backbone)
    with pytest.raises(RuntimeError, match="size of tensor"):
        trunk.hidden(embeddings(backbone, LENGTHS), [*LENGTHS, 1])  # a unit too many
    assert backbone.model.config._attn_implementation == "sdpa"


def test_two_models_on_one_backbone_in_two_threads_get_their_own_losses() -> None:
    """The attention of a model is switched by one thread at a time (16 of 60 were wrong)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns within a forward
    backbone = random_backbone("llama", num_hidden_layers=8)
    merged_model = fresh_model(backbone, [(1, 2), (3, 4, 5), (6, 7)], 0.2)
    models, matcher = [DistillModel(merged_model) for _ in range(2)], merged_model.require_matcher()
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 9, size) for size in (12, 20, 31)] for _ in range(2)]
    cuts = [[matcher.segment(ids) for ids in rows] for rows in batches]
    alone = [float(models[k](batches[k], cuts[k]).kl) for k in range(2)]
    found: list[list[float]] = [[], []]

    def work(k: int) -> None:
        found[k] += [float(models[k](batches[k], cuts[k]).kl) for _ in range(60)]

    threads = [Thread(target=work, args=(k,)) for k in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == [[alone[k]] * 60 for k in range(2)]
    assert backbone.model.config._attn_implementation == "sdpa"
