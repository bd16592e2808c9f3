"""Checkpoint and backbone of an evaluation."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.devices import default_device, has_device
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import EvaluationError
from umim_core.model.hub import fetch_checkpoint

CHECKPOINT_VARIABLE: Final = "UMIM_CHECKPOINT"
DEFAULT_CHECKPOINT: Final = "umim-docs-llama"
_log = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its lines are


def choose_checkpoint(checkpoint: str | Path | Checkpoint | None) -> Checkpoint:
    """Load what was named, else what ``UMIM_CHECKPOINT`` names, else the embedded default.

    Raises:
        CheckpointError: If it cannot be loaded.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    name, origin = checkpoint, "checkpoint="
    if name is None:
        name, origin = os.environ.get(CHECKPOINT_VARIABLE), CHECKPOINT_VARIABLE
    if not name:
        name, origin = DEFAULT_CHECKPOINT, "the embedded default"
    _log.info("umim: checkpoint %s (from %s)", name, origin)
    return Checkpoint.load(fetch_checkpoint(name))


def choose_backbone(
    backbone: str | Backbone | None,
    revision: str | None,
    checkpoint: Checkpoint | None,
    dtype: str,
    device: str | None,
) -> Backbone:
    """Load what was named, else the checkpoint's own backbone.

    Args:
        backbone: Name, directory, or a loaded backbone (returned as it is).
        revision: Hub revision of a named backbone.
        checkpoint: Names the backbone if ``backbone`` does not.
        dtype: ``auto`` (as published), or another that ``load_backbone`` takes.
        device: A torch device; None for ``cuda`` where there is one, else ``cpu``. Without CUDA a
            request for it falls back to the CPU, as in ``--model hf``.

    Raises:
        EvaluationError: If neither names a backbone.
        BackboneError: If it cannot be loaded.
        ConfigError: If the data type is unknown, or this machine has no such device.
    """
    if isinstance(backbone, Backbone):
        return backbone
    if backbone is None:
        if checkpoint is None:
            raise EvaluationError("a checkpoint or a backbone must be named", None, "Name one.")
        backbone, revision = checkpoint.config.backbone, checkpoint.config.backbone_revision
    if device is not None and device.startswith("cuda") and not has_device("cuda"):
        # The command line asks for cuda:0 unless it is told otherwise; ``hf`` falls back, too.
        _log.info("umim: no CUDA device, using the CPU instead of %s", device)
        device = "cpu"
    return load_backbone(
        backbone, revision=revision, dtype=dtype, device=device or default_device()
    )
