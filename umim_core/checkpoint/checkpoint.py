"""Merge checkpoints: module + rules + the backbone they belong to.

A checkpoint directory holds ``config.json``, ``model.safetensors``, ``rules/`` and
``manifest.json``. It holds no backbone weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint_files import (
    CHECKPOINT_SCHEMA,
    BackboneRecord,
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.checkpoint.module_weights import WEIGHTS, read_module, write_module
from umim_core.config.form import Merge, ModuleForm, check_merge, check_raw_tail
from umim_core.errors import (
    BackboneMismatchError,
    ConfigError,
    RuleSetError,
    TokenizerMismatchError,
    require,
)
from umim_core.merging.adapters import SpanAdapters, linear_maps
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule, with_rows_of
from umim_core.merging.rule_rows import RuleRows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import canonical_json, read_manifest, write_json, write_manifest
from umim_core.store.publication import publish_directory
from umim_core.text.roles import USER, Role, check_roles

_log: Final = logging.getLogger("umim")


@dataclass(frozen=True)
class Checkpoint:
    """A trained merge module, in float32, with the rules it was trained with."""

    config: CheckpointConfig
    module: MergeModule = field(repr=False)
    rules: RuleSet = field(repr=False)

    def __post_init__(self) -> None:
        if self.config.decode_max_damage is not None or self.config.budget is not None:
            self.rules.require_prices()

    def __repr__(self) -> str:
        return f"Checkpoint({self.config.backbone!r}, {self.config.form()}, {self.rules!r})"

    @classmethod
    def of(
        cls, merged_model: MergedModel, training: dict[str, str | int | float | None] | None = None
    ) -> Checkpoint:
        """Bind module and rules to the backbone that they were trained with.

        Rule rows of spans that are no rules of the matcher go; ``training`` is recorded.
        """
        backbone, rules = merged_model.backbone, merged_model.require_matcher().rules
        identity = backbone.identity
        known = json.loads(canonical_json(identity.function))
        module = with_rows_of(merged_model.require_module(), rules)
        config = CheckpointConfig(
            **_shape(module),
            backbone=backbone.name,
            backbone_revision=backbone.revision,
            backbone_fingerprint=backbone.fingerprint,
            tokenizer_fingerprint=backbone.tokenizer_fingerprint,
            training=training or {},
            backbone_model=BackboneRecord(
                model_type=identity.model_type, config=known, weights=identity.weights_digest
            ),
            decode_max_damage=merged_model.decode_max_damage,
        )
        return cls(config, module, rules)

    def with_contents(self, module: MergeModule, rules: RuleSet) -> Checkpoint:
        """Return a checkpoint of the same origin with another module and other rules.

        A bound of decoding goes where the rules have no prices, and rule rows of other rules go.
        The recommended budget goes: these rules were chosen.
        """
        module = with_rows_of(module, rules)
        bound = None if rules.prices is None else self.config.decode_max_damage
        changed = {**_shape(module), "decode_max_damage": bound, "budget": None}
        return Checkpoint(self.config.model_copy(update=changed), module, rules)

    def decoding_under(self, bound: float | None) -> Checkpoint:
        """Return the checkpoint with another bound on the price of rules while decoding, or none.

        With a bound the checkpoint recommends to merge everywhere.
        """
        checkpoint = self if bound is None else self.recommending("all")
        return checkpoint._changed({"decode_max_damage": bound})

    def recommending(
        self, merge: Merge, raw_tail: int = 0, roles: Sequence[Role] = USER
    ) -> Checkpoint:
        check_merge(merge)
        check_raw_tail(raw_tail, merge)
        check_roles(roles)
        return self._changed({"merge": merge, "raw_tail": raw_tail, "roles": tuple(roles)})

    def _changed(self, changes: Mapping[str, object]) -> Checkpoint:
        return replace(self, config=self.config.model_copy(update=changes))

    def noting(self, backbone: Backbone, reason: str) -> Checkpoint:
        said: object = reason
        rule = "allow_backbone_mismatch must say why another backbone is good enough"
        require(isinstance(said, str), ConfigError, rule, said, "Give the reason as a text.")
        differences = self.backbone_differences(backbone)
        if not reason.strip() or backbone.hidden_size != self.config.hidden_size:
            self.check_backbone(backbone)
        self.check_vocabulary(backbone)
        if not differences:
            return self
        note = f"{reason} ({backbone.name}: {'; '.join(differences)})"
        _log.warning("umim: not the checkpoint's own backbone: %s", note)
        return self._changed({"training": {**self.config.training, "backbone_mismatch": note}})

    def check_backbone(self, backbone: Backbone) -> None:
        if differences := self.backbone_differences(backbone):
            raise BackboneMismatchError(
                f"this checkpoint belongs to {self.config.backbone} "
                f"({self.config.backbone_fingerprint[:12]}, d {self.config.hidden_size})",
                f"{backbone.name} ({backbone.fingerprint[:12]}, d {backbone.hidden_size}), which "
                f"differs in: {'; '.join(differences)}",
                "Load the backbone it was trained for, or distil a module for this one.",
            )
        self.check_vocabulary(backbone)

    def backbone_differences(self, backbone: Backbone) -> list[str]:
        """Say in what a backbone is not the checkpoint's own: "field recorded -> found".

        What changes nothing of a frozen model does not count (dropout, fields that nothing reads).
        """
        config, known, identity = self.config, self.config.backbone_model, backbone.identity
        if backbone.hidden_size != config.hidden_size:
            return [f"embedding size {config.hidden_size} -> {backbone.hidden_size}"]
        if known.model_type != identity.model_type:
            return [f"model_type {known.model_type!r} -> {identity.model_type!r}"]
        changes, ours = list[str](), identity.function
        for name in sorted(known.config.keys() | ours.keys()):
            then, now = (canonical_json(c.get(name, "the default")) for c in (known.config, ours))
            if then != now:
                changes.append(f"{name} {then} -> {now}")
        if known.weights != identity.weights_digest:
            changes.append("the weights")
        return changes

    def check_vocabulary(self, backbone: Backbone) -> None:
        fingerprint = self.config.tokenizer_fingerprint
        if fingerprint and not backbone.has_tokenizer(fingerprint):
            rule = f"the tokenizer must be that of {self.config.backbone} ({fingerprint[:12]})"
            remedy = "Load the tokenizer of the backbone it was trained for."
            raise TokenizerMismatchError(rule, f"one of {backbone.named_tokenizer}", remedy)
        if not backbone.has_tokenizer(self.rules.origin.tokenizer_fingerprint):
            self.rules.check_tokenizer(backbone.tokenizer_fingerprint, backbone.named_tokenizer)
        self.rules.check_vocabulary(backbone.vocab_size, backbone.special_ids)

    def write(self, directory: Path) -> None:
        """Write the checkpoint's files into an empty directory, which need not exist."""
        directory.mkdir(exist_ok=True)
        write_json(directory / "config.json", self.config.model_dump(mode="json"))
        write_module(self.module, directory / WEIGHTS)
        self.rules.write(directory / "rules")
        write_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, body={})

    def save(self, directory: str | Path) -> None:
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, name: str | Path) -> Checkpoint:
        directory = resolve_checkpoint(name)
        names = ("config.json", WEIGHTS)
        read_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, required=names)
        config = read_config(directory)
        rules = RuleSet.load(directory / "rules")
        return cls(config, read_module(directory / WEIGHTS, config, rules), rules)


def fresh_module(backbone: Backbone, rules: RuleSet, form: ModuleForm, seed: int) -> MergeModule:
    """Return a module of a form with the weights that training starts from, on its device."""
    check_depth(form.merge_depth, backbone.num_layers)
    fits, rule = not form.rule_rows or len(rules) > 0, "rule rows need at least one rule"
    require(fits, RuleSetError, rule, 0, "Lower tau, or leave rule_rows out.")
    module = MergeModule(backbone.hidden_size, form, longest=rules.longest)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(seed))
    if form.rule_rows:
        module.rows = RuleRows.of_frequent(rules, form.rule_rows, backbone.hidden_size)
    if form.adapter_rank:
        layers = backbone.num_layers - form.merge_depth
        module.adapters = SpanAdapters(linear_maps(backbone), layers, form.adapter_rank)
        module.adapters.initialise(torch.Generator().manual_seed(seed))
    return module.to(backbone.device)


def check_depth(depth: int, layers: int) -> None:
    rule = f"merge_depth must be below {layers}, the layers of the model"
    require(depth < layers, ConfigError, rule, depth, "Choose a smaller one.")


def untrained_checkpoint(backbone: Backbone, rules: RuleSet, form: ModuleForm) -> Checkpoint:
    """Return a checkpoint that needs no training: a span has the anchor of the form's residual."""
    rule, remedy = "an untrained module must have a residual", "Choose last or exponential."
    require(form.residual != "none", ConfigError, rule, form.residual, remedy)
    rules.check_for_module(
        backbone.tokenizer_fingerprint, backbone.vocab_size, backbone.special_ids
    )
    module = fresh_module(backbone, rules, form, seed=0)
    merged_model = MergedModel(backbone, module, Matcher(rules))
    return Checkpoint.of(merged_model, {"steps": 0, "seed": 0})


def _shape(module: MergeModule) -> dict[str, Any]:
    """Return the fields of a configuration that follow from the module."""
    return module.form.model_dump() | {
        "hidden_size": module.hidden_size,
        "num_heads": module.num_heads,
    }
