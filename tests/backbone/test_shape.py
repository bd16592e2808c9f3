"""The shape of a backbone, against the weights of a model built from the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig, PreTrainedConfig

from support.family_configs import EXACT, random_model
from support.tiny_models import tiny_config
from umim_core.backbone.shape import BackboneShape, local_shape
from umim_core.errors import ConfigError

CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: tiny_config(name) for name in ("llama", "mistral", "phi", "gpt2", "gpt-neo")},
    "llama, wide heads": tiny_config("llama", head_dim=32),
    "qwen2, tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen3, wide heads": tiny_config("qwen3", head_dim=32),
    "gpt-neox": tiny_config("gpt_neox", intermediate_size=128),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_the_models_matrices(name: str) -> None:
    config = CONFIGS[name]
    matrices = {
        key: parameter.numel()
        for key, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        if parameter.ndim == 2 and "wpe" not in key
    }
    assert BackboneShape.of_config(config).weights == sum(matrices.values())


def test_of_a_model_at_hand_the_weights_of_its_blocks_are_counted() -> None:
    for name, config in EXACT.items():
        model = random_model(config)
        shape = BackboneShape.of_model(model)
        tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        counted = sum(
            weight.numel()
            for weight in model.base_model.parameters()
            if weight.ndim == 2 and id(weight) not in tables
        )
        off = abs(shape.block_weights - counted)  # of a width of the feed-forward part
        assert off <= 1.5 * shape.layers * shape.hidden_size, name
        assert shape.head_weights == model.get_output_embeddings().weight.numel(), name


def test_an_embedded_backbone_tells_its_shape() -> None:
    shape = local_shape("umim-docs-gpt2")
    assert shape is not None
    assert (shape.hidden_size, shape.intermediate_size, shape.layers) == (192, 768, 4)
    assert shape.tied
    assert not shape.gated_mlp


def test_a_backbone_elsewhere_has_no_shape_here(tmp_path: Path) -> None:
    assert local_shape("no/such-model") is None
    assert local_shape(str(tmp_path)) is None


@pytest.mark.parametrize("config", [FalconConfig(), MambaConfig()], ids=["falcon", "mamba"])
def test_a_family_of_another_build_is_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ConfigError, match=f"got {config.model_type}. State it in hardware.shapes"):
        BackboneShape.of_config(config)
