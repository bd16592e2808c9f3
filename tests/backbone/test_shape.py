"""The shape of a backbone, against the weights of a model built from the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from umim_core.backbone.shape import BackboneShape, local_shape
from umim_core.errors import ConfigError

LLAMA_LIKE = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LLAMA_LIKE),
    "llama, wide heads": LlamaConfig(**LLAMA_LIKE, head_dim=32),
    "mistral": MistralConfig(**LLAMA_LIKE),
    "qwen2, tied": Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**LLAMA_LIKE, head_dim=32),
    "phi": PhiConfig(**LLAMA_LIKE),
    "gpt2": GPT2Config(vocab_size=1000, n_embd=64, n_layer=3, n_head=4, n_positions=8),
    "gpt-neo": GPTNeoConfig(
        vocab_size=1000,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
        max_position_embeddings=8,
    ),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    ),
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
