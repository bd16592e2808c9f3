"""Loading of a model's checkpoint and backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone, load_backbone, wrap_backbone
from umim_core.backbone.model_files import AUTO, check_dtype
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CheckpointConfig, default_checkpoint
from umim_core.errors import BackboneError
from umim_core.model.hub import fetch_checkpoint
from umim_core.rules.pruning import at_reduction, check_rule_choice, within_budget, without_tokens


class LoadOptions(TypedDict, total=False):
    """Options of ``UMIM.from_pretrained``; those of transformers mean what they mean there.

    Attributes:
        model: The backbone as a transformers model that is in memory; it is left as it is.
        tokenizer: Its tokenizer; the one of the checkpoint's backbone if not given.
        backbone: The backbone, or where to find it, if not under the checkpoint's own name.
        backbone_revision: Hub revision of a ``backbone`` that is named.
        revision: Revision of the checkpoint's hub repository to pin.
        dtype: Data type of the backbone to load, as a name or torch's own; ``published`` is that of
            its weights; ``auto``, the default, is bfloat16 where the device computes it faster,
            else float32.
        device: A torch device to load it on; the CPU if not given.
        attn_implementation: ``sdpa`` or ``eager``.
        local_files_only: Whether the network must not be asked.
        allow_backbone_mismatch: Why a backbone that is not the checkpoint's own is good enough
            (a quantised one, say); the reason is recorded in what is saved.
        protect: Tokens that are never merged: ``digits``, ``capitals``, ``newlines``, or a regular
            expression that is searched in the text of a token; one, or several. Rules with such a
            token go, from what is saved, too.
        budget: Largest measured loss of a rule, in nats per saved token (``RuleSet.prices``); all
            others go, from what is saved, too; ``math.inf`` keeps every rule. If neither this nor
            ``target_tr`` is given, the checkpoint's own budget counts; most have none.
        target_tr: Token reduction instead of a budget: the cheapest rules stay that save this share
            of the text that their prices were measured with.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    backbone: str | Path | Backbone | None
    backbone_revision: str | None
    revision: str | None
    dtype: str | torch.dtype | None
    device: str | None
    attn_implementation: str | None
    local_files_only: bool
    allow_backbone_mismatch: str | None
    protect: str | Sequence[str] | None
    budget: float | None
    target_tr: float | None


_OF_FILES: Final = ("dtype", "device", "attn_implementation")


def check_load_options(options: LoadOptions) -> None:
    """Refuse options that do not exist, as Python does for arguments, or do not go together."""
    known = LoadOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"unknown options {unknown}; known are {', '.join(sorted(known))}")
    check_rule_choice(options.get("budget"), options.get("target_tr"))
    check_dtype(_dtype(options))
    given = {name: value for name, value in options.items() if value is not None}
    loaded = "model" in given or isinstance(given.get("backbone"), Backbone)
    if loaded and (late := {name: given[name] for name in _OF_FILES if name in given}):
        rule = "a backbone that is loaded already has its data type and device"
        raise BackboneError(rule, late, "Leave them out, or name the backbone.")
    pinned = given.get("backbone_revision")
    if pinned and not isinstance(given.get("backbone"), str | Path):  # the checkpoint's own counts
        rule = "backbone_revision is that of a backbone that is named"
        raise BackboneError(rule, pinned, "Name the backbone, too.")
    if {"model", "backbone"} <= given.keys():
        raise BackboneError("model and backbone must not both be given", remedy="Leave one out.")
    if "tokenizer" in given and "model" not in given:
        raise BackboneError("a tokenizer must come with its model", remedy="Pass model, too.")


def _dtype(options: LoadOptions) -> str:
    return str(options.get("dtype") or AUTO).removeprefix("torch.")


def find_backbone(config: CheckpointConfig | None, options: LoadOptions) -> Backbone:
    """Load or wrap the backbone that a checkpoint is to be used with.

    The options are what ``check_load_options`` lets pass; only where they name the backbone there
    may be no checkpoint.
    """
    local = options.get("local_files_only", False)
    model, name = options.get("model"), options.get("backbone")
    if isinstance(name, Backbone):
        return name
    revision = options.get("backbone_revision")
    if name is None:
        if config is None:
            raise BackboneError("a checkpoint or a backbone must be named", None, "Name one.")
        name, revision = config.backbone, config.backbone_revision
    name = str(name)
    if model is not None:
        tokenizer = options.get("tokenizer")
        if tokenizer is None:
            tokenizer = load_tokenizer(name, revision=revision, local_files_only=local)
        path = getattr(model, "name_or_path", None)  # a module that is no model has none
        return wrap_backbone(model, tokenizer, name=path or "in-memory")
    return load_backbone(
        name,
        revision=revision,
        dtype=_dtype(options),
        device=options.get("device"),
        attn_implementation=options.get("attn_implementation"),
        local_files_only=local,
    )


def find_both(
    name: str | Path | Checkpoint | None, options: LoadOptions
) -> tuple[Backbone, Checkpoint]:
    """Load a checkpoint, by default ``default_checkpoint``, and the backbone for it.

    Rules that hold a token of ``protect``, or are dearer than ``budget`` or ``target_tr`` allows,
    are left out; without these two, what the checkpoint's own budget does not allow.
    """
    local = options.get("local_files_only", False)
    if isinstance(name, Checkpoint):
        checkpoint = name
    else:
        source = default_checkpoint(local_files_only=local) if name is None else name
        place = fetch_checkpoint(source, options.get("revision"), local_files_only=local)
        checkpoint = Checkpoint.load(place)
    budget, target = options.get("budget"), options.get("target_tr")
    if budget is None and target is None:
        budget = checkpoint.config.budget
    rules = at_reduction(within_budget(checkpoint.rules, budget), target)
    backbone = find_backbone(checkpoint.config, options)
    protect: Any = options.get("protect")
    if protect:
        if backbone.tokenizer is None:
            raise BackboneError("protected tokens need a tokenizer", backbone.name, "Attach one.")
        several = isinstance(protect, Iterable) and not isinstance(protect, str | bytes)
        patterns: list[Any] = [*protect] if several else [protect]
        rules = without_tokens(rules, backbone.tokenizer, patterns)
    if rules is checkpoint.rules and checkpoint.config.budget is None:
        return backbone, checkpoint
    return backbone, checkpoint.with_contents(checkpoint.module, rules)
