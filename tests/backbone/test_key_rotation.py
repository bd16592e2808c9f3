from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import key_rotation
from umim_core.errors import BackboneError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}


def first_keys(backbone: Backbone, positions: Tensor) -> Tensor:
    """Keys of the first layer [H, L, D]: of tokens and positions alone."""
    cache = DynamicCache()
    with torch.no_grad():
        backbone.model(IDS, position_ids=positions[None], past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[0]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen3", {}),
        ("gpt_neox", {"hidden_size": 64}),  # turns a quarter of a head's dimensions
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_turned_keys_are_those_of_the_new_positions(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    backbone = random_backbone(family, dtype, **changes)
    old, new = torch.tensor([0, 1, 2, 7, 30, 31]), torch.tensor([0, 1, 2, 3, 4, 60])
    written, expected = first_keys(backbone, old), first_keys(backbone, new)
    rotation = key_rotation(backbone)
    found = rotation.turn(written, (new - old).expand(len(written), -1))
    scale = 1e-5 if dtype is torch.float64 else 0.03
    torch.testing.assert_close(found, expected, atol=scale * float(expected.abs().max()), rtol=0)
    assert torch.equal(found[:, :3], written[:, :3])  # they stayed where they were
    assert not torch.allclose(found[:, 3:], written[:, 3:], atol=0.01)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "no rotation of all layers"),
        ("helium", {"head_dim": 4, "num_key_value_heads": 4}, "layer 0 are turned in another way"),
        ("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, "change with the length"),
    ],
)
def test_other_positions_are_refused_by_name(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BackboneError, match=reason):
        key_rotation(random_backbone(family, **changes))
