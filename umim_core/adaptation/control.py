"""Controls of task adaptation: the base model with as many trained weights, and nothing merged.

A control learns from the labels that the merge module learns from, has about its number of
parameters, and starts as the base model. What adaptation gains beyond it is the gain of merging, at
a token reduction of 0.

Only the preference loss trains one. The distillation loss of a text without merges is at its least
from the start, where student and teacher are one model.

A control is a file of ``umim_core/adaptation/controls``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedModel

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import forked_generators
from umim_core.backbone.model_files import frozen_twin
from umim_core.checkpoint.checkpoint_files import BackboneRecord
from umim_core.checkpoint.module_weights import WEIGHTS, read_weights, write_module
from umim_core.errors import BackboneMismatchError, CheckpointError, TokenizerMismatchError
from umim_core.merging.merged_model import MergedModel
from umim_core.registry import Registry
from umim_core.store.artifacts import (
    described,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)

Install = Callable[[Backbone], nn.Module]
CONTROLS: Final = Registry[Install]("umim_core.adaptation.controls", "control of adaptation")
"""Functions that put untrained weights into a backbone's model and return the module of just them.

The backbone is a twin that they may change; its weights, which it shares, they leave alone.
"""


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
    install = CONTROLS.find(kind)
    twin = _with_model(backbone, frozen_twin(backbone.model))
    with forked_generators(backbone.device):
        torch.manual_seed(seed)
        module = install(twin).to(backbone.device)
    twin.model.train(False)
    return Control(kind, module, MergedModel.without_merging(_with_model(twin, twin.model)))


def merge_module_size(hidden_size: int) -> int:
    """Return the parameters of the paper's merge module, 2 d^2 + 7 d."""
    return 2 * hidden_size**2 + 7 * hidden_size


def _with_model(backbone: Backbone, model: PreTrainedModel) -> Backbone:
    """Return a backbone with another model of the same form, taken apart."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    return replace(
        backbone,
        model=model,
        embedding=model.get_input_embeddings(),
        trunk=model.base_model,
        projection=head,
    )


KIND: Final = "control"
SCHEMA: Final = 1
_CONFIG: Final = "config.json"


class ControlRecord(BaseModel):
    """Content of a control's ``config.json``: its kind, parameters, training, and its backbone.

    Fingerprints are SHA-256 of the backbone's architecture and weights, and of its tokenizer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    size: int
    backbone: str
    backbone_revision: str | None
    backbone_fingerprint: str
    backbone_model: BackboneRecord
    tokenizer_fingerprint: str
    training: dict[str, str | int | float | None]


def write_control(
    control: Control, training: Mapping[str, str | int | float | None], directory: Path
) -> None:
    backbone = control.merged_model.backbone
    record = ControlRecord(
        kind=control.kind,
        size=control.size,
        backbone=backbone.name,
        backbone_revision=backbone.revision,
        backbone_fingerprint=backbone.fingerprint,
        backbone_model=BackboneRecord.of(backbone),
        tokenizer_fingerprint=backbone.tokenizer_fingerprint,
        training=dict(training),
    )
    write_json(directory / _CONFIG, record.model_dump(mode="json"))
    write_module(control.module, directory / WEIGHTS)
    write_manifest(directory, kind=KIND, schema=SCHEMA, body={})


def load_control(directory: Path, backbone: Backbone) -> MergedModel:
    """Return the base model that reads through a trained control."""
    read_manifest(directory, kind=KIND, schema=SCHEMA, required=(_CONFIG, WEIGHTS))
    record = read_record(directory)
    _check_backbone(record, backbone)
    control = fresh_control(record.kind, backbone, seed=0)
    shapes = {name: tuple(value.shape) for name, value in control.module.state_dict().items()}
    control.module.load_state_dict(read_weights(directory / WEIGHTS, shapes))
    control.module.requires_grad_(False)
    return control.merged_model


def read_record(directory: Path) -> ControlRecord:
    rule = f"{directory / _CONFIG} must describe a control"
    with described(rule, "Train it again with this version.", CheckpointError):
        return ControlRecord.model_validate(read_json(directory / _CONFIG))


def _check_backbone(record: ControlRecord, backbone: Backbone) -> None:
    known, tokenizer = record.backbone_model, record.tokenizer_fingerprint
    differences = backbone.identity.differences(known.model_type, known.config, known.weights)
    if differences:
        raise BackboneMismatchError(
            f"this control belongs to {record.backbone} ({record.backbone_fingerprint[:12]})",
            f"{backbone.name} ({backbone.fingerprint[:12]}), "
            f"which differs in: {'; '.join(differences)}",
            "Load the backbone it was trained on, or train a control for this one.",
        )
    if tokenizer and not backbone.has_tokenizer(tokenizer):
        raise TokenizerMismatchError(
            f"{record.backbone} must have the tokenizer {tokenizer[:12]}",
            backbone.tokenizer_fingerprint[:12],
            "Load the tokenizer of the backbone it was trained on.",
        )
