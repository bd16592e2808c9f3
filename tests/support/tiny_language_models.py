"""Architectures and a training configuration small enough to train in a test."""

from __future__ import annotations

from umim_core.config.backbone_recipe import LanguageModelConfig

LENGTH = 12
SHAPES: dict[str, dict[str, object]] = {
    "llama": {
        "kind": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "max_positions": 64,
    },
    "gpt2": {"kind": "gpt2", "hidden_size": 16, "layers": 2, "heads": 2, "max_positions": 64},
}
CONFIG = LanguageModelConfig(
    max_steps=6,
    batch_size=4,
    sequence_length=LENGTH,
    learning_rate=1e-2,
    validate_every=2,
    checkpoint_every=2,
    patience=100,
    bf16=False,
)
