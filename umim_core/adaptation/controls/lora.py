"""LoRA: trained low-rank changes of attention's projections, by the library peft.

    W x + B A x        A [r, n] random, B [m, r] zero at the start; no dropout, alpha = r

The projections are peft's choice for the model's family (queries and values of Llama, the joint
projection of GPT-2). A rank costs n + m parameters a projection; r is the rank, at least 1, with
which they come nearest to the 2 d^2 + 7 d of a merge module. SmolLM2-135M (d 576): 667,584 wanted,
rank 12 has 691,200.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from umim_core.adaptation.control import CONTROLS, merge_module_size
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin
from umim_core.errors import ConfigError, MissingExtraError


@CONTROLS.add("lora")
def lora(twin: Backbone) -> nn.ParameterDict:
    """Change attention's projections by low-rank products; the nearest rank to 2 d^2 + 7 d."""
    per_rank = sum(weight.numel() for weight in _inject(frozen_twin(twin.model), 1).values())
    return _inject(twin.model, max(1, round(merge_module_size(twin.hidden_size) / per_rank)))


def _inject(model: nn.Module, rank: int) -> nn.ParameterDict:
    """Put low-rank products into a model and return their weights, in single precision."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError(
            "the control lora needs peft", str(error), "pip install 'umim[pipeline]'"
        ) from error
    transposed = any(isinstance(layer, Conv1D) for layer in model.modules())
    config = LoraConfig(r=rank, lora_alpha=rank, fan_in_fan_out=transposed)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(
            "the control lora needs a model family that peft has projections for",
            f"{type(model).__name__}: {error}",
            "Choose the control input-adapter.",
        ) from error
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for weight in trained.values():
        weight.data = weight.data.float()
    return nn.ParameterDict({name.replace(".", "/"): weight for name, weight in trained.items()})
