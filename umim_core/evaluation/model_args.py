"""Model that lm-eval's ``--model_args`` name: checkpoint, backbone, data type and device.

lm-eval hands the arguments to a task as part of its metadata: ``task_tokenizer`` and
``task_context`` read them there, as lm-eval's own RULER tasks do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from transformers import PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import default_device, has_device
from umim_core.backbone.shape import trained_context
from umim_core.backbone.tokenizer_files import load_tokenizer, quantisation_note
from umim_core.baselines.methods import TargetReduction
from umim_core.baselines.registry import find_baseline
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import (
    CheckpointConfig,
    default_checkpoint,
    read_config,
    resolve_checkpoint,
)
from umim_core.config.form import Merge, check_merge, check_raw_tail
from umim_core.errors import ConfigError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.model.hub import fetch_checkpoint
from umim_core.model.loading import LoadOptions, find_backbone, find_checkpoint
from umim_core.model.umim import UMIM

CHECKPOINT_VARIABLE: Final = "UMIM_CHECKPOINT"
AskedMerge = Merge | Literal["auto"]
AUTO: Final = "auto"  # merge as the checkpoint recommends
_log = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its lines are


def check_modes(
    method: str | None,
    allow_backbone_mismatch: str | None,
    compare: str | None,
    protect: str | Sequence[str] | None,
    target_tr: float | None,
    merge: Merge,
    raw_tail: int,
) -> None:
    check_merge(merge)
    check_raw_tail(raw_tail, merge)
    none, with_none = merge == "none", "with merge=none"
    _refuse(
        (compare not in (None, "base"), "compare must be base", f"compare={compare}"),
        (
            method is not None and merge != "prompt",
            "a baseline merges prompts only",
            f"method {method!r} with merge {merge!r}",
        ),
        (none and compare is not None, "compare=base needs a model that merges", "merge=none"),
        (
            none and target_tr is not None,
            "target_tr chooses rules, or is the budget of a baseline (method)",
            f"target_tr={target_tr} {with_none}",
        ),
        (none and protect, "protect keeps tokens from being merged", f"{protect!r} {with_none}"),
        (
            method is not None and protect,
            "protect is of the checkpoint's own rules, and a baseline deletes tokens by its own",
            f"{protect!r} with method {method!r}",
        ),
        (
            none and allow_backbone_mismatch is not None,
            "allow_backbone_mismatch must not come with merge=none, which takes any backbone",
            allow_backbone_mismatch,
        ),
    )


def _refuse(*rules: tuple[object, str, str | None]) -> None:
    """Refuse the first of (whether it is broken, rule, value)."""
    for broken, rule, value in rules:
        require(not broken, ConfigError, rule, value, "Leave one of them out.")


def recommended(
    checkpoint: str | Path | Checkpoint | None,
    merge: AskedMerge,
    raw_tail: int | None,
    method: str | None,
    target: TargetReduction | None,
) -> tuple[str | Path | Checkpoint | None, Merge, int]:
    """Return the checkpoint, what is merged and the raw tail, as ``UMIM.generate`` chooses them.

    The checkpoint is loaded where something is left to it: ``merge`` ``auto``, ``raw_tail`` None. A
    baseline ``method`` reads prompts merged, or shortened, alone; with a ``target`` of its own,
    policies of the cache take no raw tail.
    """
    known: AskedMerge = "prompt" if method is not None and merge == AUTO else merge
    if raw_tail is None and (
        known == "none" or (target and method and find_baseline(method).side == "cache")
    ):
        raw_tail = 0
    if known != AUTO and raw_tail is not None:
        return checkpoint, known, raw_tail
    loaded = find_checkpoint(_checkpoint(checkpoint), {})
    chosen = loaded.config.recommended(None if known == AUTO else known, raw_tail)
    return loaded, *chosen


def target_of(
    method: str | None, match: str | None, target_tr: float | None, raw_tail: int = 0
) -> TargetReduction | None:
    """Return the token reduction that a baseline is asked for; None for that of the rules."""
    _refuse(
        (
            match not in (None, "umim"),
            "match must be umim, the token reduction of the rules",
            match,
        ),
        (
            match is not None and target_tr is not None,
            "a baseline has one budget: match=umim or target_tr",
            f"match={match}, target_tr={target_tr}",
        ),
        (
            method is None and match is not None,
            "match is the budget of a baseline, as method=truncation; `umim baselines` lists all",
            f"match={match} without method",
        ),
        (
            method and target_tr is not None and raw_tail and find_baseline(method).side == "cache",
            "raw_tail changes nothing of a policy that reads contexts whole, at a target_tr",
            f"raw_tail={raw_tail}, target_tr={target_tr} with method {method!r}",
        ),
    )
    return None if method is None or target_tr is None else TargetReduction(target_tr)


def open_model_args(
    checkpoint: str | Path | Checkpoint | None,
    merge: Merge,
    backbone: str | Backbone | None,
    revision: str | None,
    dtype: str,
    device: str | None,
    merging: LoadOptions | None = None,
) -> MergedModel:
    """Open what was named; see ``UmimLM``. ``merging`` counts where something is merged.

    With ``merge=none`` a checkpoint only names its backbone: nothing but its configuration is read,
    and not even that where a backbone is given.
    """
    options = LoadOptions(backbone=backbone, backbone_revision=revision)
    if not isinstance(backbone, Backbone):
        options |= LoadOptions(dtype=dtype, device=_device(device))
    if merge != "none":
        options |= merging or LoadOptions()
        return _noted(UMIM.from_pretrained(_checkpoint(checkpoint), **options).merged_model)
    if backbone is None:
        config = checkpoint_config(checkpoint)
        options |= LoadOptions(backbone=config.backbone, backbone_revision=config.backbone_revision)
    return _noted(MergedModel.without_merging(find_backbone(None, options)))


def _noted(merged_model: MergedModel) -> MergedModel:
    """Log where the figures of the base model are those of dequantised weights."""
    if note := quantisation_note(merged_model.backbone.name):
        _log.info("umim: %s", note)
    return merged_model


def checkpoint_config(given: str | Path | Checkpoint | None) -> CheckpointConfig:
    """Read the configuration of a checkpoint; None is the one that is taken where none is named."""
    checkpoint = _checkpoint(given)
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.config
    return read_config(resolve_checkpoint(fetch_checkpoint(checkpoint)))


def _checkpoint(checkpoint: str | Path | Checkpoint | None) -> str | Path | Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    name, origin = checkpoint, "checkpoint="
    if name is None:
        name, origin = os.environ.get(CHECKPOINT_VARIABLE), CHECKPOINT_VARIABLE
    if not name:
        name, origin = default_checkpoint(), "the embedded default"
    _log.info("umim: checkpoint %s (from %s)", name, origin)
    return name


def _device(asked: str | None) -> str:
    if asked is not None and asked.startswith("cuda") and not has_device("cuda"):
        # lm-eval's command line asks for cuda:0 by default.
        _log.info("umim: no CUDA device, using the CPU instead of %s", asked)
        return "cpu"
    return asked or default_device()


# Arguments of models that name a backbone: ``umim``'s, ``hf``'s, and those of services.
_NAMES: Final = ("backbone", "pretrained", "model")


def task_context(metadata: Mapping[str, object]) -> int | None:
    """Return how many tokens the backbone was trained for that a model's arguments name.

    ``max_length`` (else the backbone's configuration) is the context; None if it is unknown.
    Arguments that name no backbone are those of ``umim``: the checkpoint's counts, else the default
    checkpoint's.
    """
    most = metadata.get("max_length")
    return most if isinstance(most, int) else trained_context(*_named(metadata))


def task_tokenizer(metadata: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that a task's metadata name; see `task_context`."""
    tokenizer = metadata.get("tokenizer")
    if isinstance(tokenizer, str):
        return load_tokenizer(tokenizer)
    name, revision = _named(metadata)
    return load_tokenizer(name, revision=revision)


def _named(metadata: Mapping[str, object]) -> tuple[str, str | None]:
    revision = metadata.get("revision")
    for key in _NAMES:
        name = metadata.get(key)
        if isinstance(name, str):
            return name, revision if isinstance(revision, str) else None
    checkpoint = metadata.get("checkpoint")
    config = checkpoint_config(checkpoint if isinstance(checkpoint, str | Checkpoint) else None)
    return config.backbone, config.backbone_revision
