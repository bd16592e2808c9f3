"""Controls of task adaptation: the base model with as many trained weights, and nothing merged.

A control learns from the labels that the merge module learns from, has about its number of
parameters, and starts as the base model. What adaptation gains beyond it is the gain of merging, at
a token reduction of 0.

Only the preference loss trains one. The distillation loss of a text without merges is at its least
from the start, where student and teacher are one model.

A new control is a function here with an entry in ``CONTROLS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import forked_generators
from umim_core.backbone.model_files import frozen_twin
from umim_core.checkpoint.module_weights import WEIGHTS, read_weights, shapes_of, write_module
from umim_core.errors import CheckpointError, ConfigError, MissingExtraError, look_up
from umim_core.merging.merged_model import MergedModel
from umim_core.store.artifacts import (
    described,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)

KIND: Final = "control"
SCHEMA: Final = 1
_CONFIG: Final = "config.json"


class InputAdapter(nn.Module):
    """A trained change A of the embedding of every raw token; zero until it is trained.

        e'(x) = e(x) + A(e(x))        A(e) = s * (W_2 LN(GELU(W_1 LN(e) + b_1)) + b_2)

    W_2 and b_2 are zero at the start. The scale s begins at the standard deviation of the
    embeddings, as the output scale of a merge module does. A has exactly its 2 d^2 + 7 d
    parameters: two products 2 d^2 + 2 d, two norms 4 d, the scale d.
    """

    def __init__(self, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.norm_e = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.norm_h = nn.LayerNorm(hidden_size)
        self.outer = nn.Linear(hidden_size, hidden_size)
        self.scale = nn.Parameter(torch.full((hidden_size,), scale))
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return A(e) [..., d] in single precision for embeddings [..., d]."""
        hidden = self.norm_h(F.gelu(self.inner(self.norm_e(embeddings.float()))))
        out: Tensor = self.scale * self.outer(hidden)
        return out


class _AdaptedEmbedding(nn.Module):
    """An embedding layer, and what an adapter adds to what it gives."""

    def __init__(self, embedding: nn.Module, adapter: InputAdapter) -> None:
        super().__init__()
        self.embedding, self.adapter = embedding, adapter
        self.weight = embedding.get_parameter("weight")

    def forward(self, ids: Tensor) -> Tensor:
        plain: Tensor = self.embedding(ids)
        change: Tensor = self.adapter(plain)
        return plain + change.to(plain.dtype)


def input_adapter(twin: Backbone) -> InputAdapter:
    """Change the embedding of every token; 2 d^2 + 7 d parameters."""
    adapter = InputAdapter(twin.hidden_size, twin.embedding_std).to(twin.device)
    twin.model.set_input_embeddings(_AdaptedEmbedding(twin.embedding, adapter))
    return adapter


def lora(twin: Backbone) -> nn.ParameterDict:
    """Change attention's projections by low-rank products, by the library peft.

        W x + B A x        A [r, n] random, B [m, r] zero at the start; no dropout, alpha = r

    The projections are peft's choice for the model's family (queries and values of Llama, the joint
    projection of GPT-2). A rank costs n + m parameters a projection; r is the rank, at least 1,
    with which they come nearest to the 2 d^2 + 7 d of a merge module. SmolLM2-135M (d 576): 667,584
    wanted, rank 12 has 691,200.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """
    per_rank = sum(weight.numel() for weight in _inject(frozen_twin(twin.model), 1).values())
    wanted = 2 * twin.hidden_size**2 + 7 * twin.hidden_size
    return _inject(twin.model, max(1, round(wanted / per_rank)))


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


CONTROLS: Final[dict[str, Callable[[Backbone], nn.Module]]] = {
    "input-adapter": input_adapter,
    "lora": lora,
}
"""Functions that put untrained weights into a backbone's model and return the module of just them.

The backbone is a twin that they may change; its weights, which it shares, they leave alone.
"""


def find_control(kind: str) -> Callable[[Backbone], nn.Module]:
    return look_up(CONTROLS, kind, "a control of adaptation", "A new one is an entry of CONTROLS.")


@dataclass(frozen=True)
class Control:
    kind: str
    module: nn.Module = field(repr=False)
    merged_model: MergedModel

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def fresh_control(kind: str, backbone: Backbone, seed: int) -> Control:
    """Return an untrained control, which computes what the base model computes, bit for bit."""
    install = find_control(kind)
    twin = replace(backbone, model=frozen_twin(backbone.model))
    with forked_generators(backbone.device):
        torch.manual_seed(seed)
        module = install(twin).to(backbone.device)
    twin.model.train(False)
    whole = replace(twin)  # it looks for its parts anew
    return Control(kind, module, MergedModel.without_merging(whole))


class ControlRecord(BaseModel):
    """Content of a control's ``config.json``: its kind, parameters and training."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: str
    size: int
    training: dict[str, str | int | float | None]


def write_control(
    control: Control, training: Mapping[str, str | int | float | None], directory: Path
) -> None:
    record = ControlRecord(kind=control.kind, size=control.size, training=dict(training))
    write_json(directory / _CONFIG, record.model_dump(mode="json"))
    write_module(control.module, directory / WEIGHTS)
    write_manifest(directory, kind=KIND, schema=SCHEMA, body={})


def load_control(directory: Path, backbone: Backbone) -> MergedModel:
    """Return the base model, of the backbone it was trained on, that reads through a control."""
    read_manifest(directory, kind=KIND, schema=SCHEMA, required=(_CONFIG, WEIGHTS))
    record = read_record(directory)
    control = fresh_control(record.kind, backbone, seed=0)
    weights = read_weights(directory / WEIGHTS, shapes_of(control.module))
    control.module.load_state_dict(weights)
    control.module.requires_grad_(False)
    return control.merged_model


def read_record(directory: Path) -> ControlRecord:
    rule = f"{directory / _CONFIG} must describe a control"
    with described(rule, "Train it again with this version.", CheckpointError):
        return ControlRecord.model_validate(read_json(directory / _CONFIG))
