"""Model that lm-eval's ``--model_args`` name: checkpoint, backbone, data type and device."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import default_device, has_device
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import DEFAULT_CHECKPOINT
from umim_core.config.form import Merge
from umim_core.merging.compressed import Compressed
from umim_core.model.loading import LoadOptions, find_backbone, find_checkpoint
from umim_core.model.umim import UMIM

CHECKPOINT_VARIABLE: Final = "UMIM_CHECKPOINT"
_log = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its lines are


def open_model_args(
    checkpoint: str | Path | Checkpoint | None,
    merge: Merge,
    backbone: str | Backbone | None,
    revision: str | None,
    dtype: str,
    device: str | None,
    allow_backbone_mismatch: str | None = None,
) -> Compressed:
    """Open what was named; see ``UmimLM``. With ``merge=none`` a checkpoint names its backbone.

    Raises:
        CheckpointError: If the checkpoint cannot be loaded.
        BackboneError: If the backbone cannot be loaded.
        BackboneMismatchError: If the backbone is not the checkpoint's own.
        ConfigError: If the data type is unknown, or this machine has no such device.
    """
    options = LoadOptions(backbone=backbone, backbone_revision=revision)
    if not isinstance(backbone, Backbone):
        options |= LoadOptions(dtype=dtype, device=_device(device))
    if merge != "none":
        options |= LoadOptions(allow_backbone_mismatch=allow_backbone_mismatch)
        return UMIM.from_pretrained(_checkpoint(checkpoint), **options).compressed
    alone = backbone is not None and checkpoint is None
    named = None if alone else find_checkpoint(_checkpoint(checkpoint), options)
    return Compressed.without_merging(find_backbone(named, options))


def _checkpoint(given: str | Path | Checkpoint | None) -> str | Path | Checkpoint:
    """Return what was given, else what ``UMIM_CHECKPOINT`` names, else the embedded default."""
    name, origin = given, "checkpoint="
    if name is None:
        name, origin = os.environ.get(CHECKPOINT_VARIABLE), CHECKPOINT_VARIABLE
    if not name:
        name, origin = DEFAULT_CHECKPOINT, "the embedded default"
    _log.info("umim: checkpoint %s (from %s)", name, origin)
    return name


def _device(asked: str | None) -> str:
    """Return where to load: on the CPU where CUDA is asked for and missing, as ``hf`` does."""
    if asked is not None and asked.startswith("cuda") and not has_device("cuda"):
        # lm-eval's command line asks for cuda:0 by default.
        _log.info("umim: no CUDA device, using the CPU instead of %s", asked)
        return "cpu"
    return asked or default_device()
