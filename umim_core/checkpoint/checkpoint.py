"""Merge checkpoints: module + rules + the backbone they belong to.

A checkpoint directory holds ``config.json``, ``model.safetensors``, ``rules/`` and
``manifest.json``. It holds no backbone weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint_files import (
    CHECKPOINT_SCHEMA,
    BackboneRecord,
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.errors import (
    BackboneMismatchError,
    CheckpointError,
    ConfigError,
    TokenizerMismatchError,
)
from umim_core.merging.compressed import Compressed
from umim_core.merging.forms.rule_rows import RuleRows
from umim_core.merging.module import MAX_SPAN, MergeModule, with_rows_of
from umim_core.rules.protect import check_vocabulary
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_manifest, write_json, write_manifest
from umim_core.store.publication import publish_directory

_log: Final = logging.getLogger("umim")
_SPANS: Final = "rows.spans"  # tensors of rule rows
_TABLE: Final = "rows.table"


@dataclass(frozen=True)
class Checkpoint:
    """A trained merge module with its rules.

    Attributes:
        config: Architecture and origin.
        module: The merge module, float32.
        rules: The rules it was trained with.

    Raises:
        RuleSetError: If the configuration bounds the damage of rules that have no prices.
    """

    config: CheckpointConfig
    module: MergeModule = field(repr=False)
    rules: RuleSet = field(repr=False)

    def __post_init__(self) -> None:
        if self.config.decode_max_damage is not None:
            self.rules.require_prices()

    def __repr__(self) -> str:
        """Return the backbone's name, the form of the module, and the rules."""
        return f"Checkpoint({self.config.backbone!r}, {self.config.form()}, {self.rules!r})"

    @classmethod
    def of(
        cls,
        compressed: Compressed,
        training: dict[str, str | int | float | None] | None = None,
    ) -> Checkpoint:
        """Bind module and rules to the backbone and the unit positions they were trained with.

        Args:
            compressed: The model with its rules.
            training: How the module was trained.

        Raises:
            ConfigError: If there is no merge module or there are no rules.
        """
        backbone, module = compressed.backbone, compressed.require_module()
        config = CheckpointConfig(
            **_shape(module),
            unit_positions=compressed.unit_positions,
            backbone=backbone.name,
            backbone_revision=backbone.revision,
            backbone_fingerprint=backbone.fingerprint,
            tokenizer_fingerprint=backbone.tokenizer_fingerprint,
            training=training or {},
            backbone_model=BackboneRecord.of(backbone),
            decode_max_damage=compressed.decode_max_damage,
        )
        return cls(config, module, compressed.require_matcher().rules)

    def with_contents(self, module: MergeModule, rules: RuleSet) -> Checkpoint:
        """Return a checkpoint of the same origin with another module and other rules.

        A bound of decoding goes where the rules have no prices, and rule rows of other rules go.
        """
        module = with_rows_of(module, rules)
        bound = None if rules.prices is None else self.config.decode_max_damage
        changed = {**_shape(module), "decode_max_damage": bound}
        return Checkpoint(self.config.model_copy(update=changed), module, rules)

    def decoding_under(self, bound: float | None) -> Checkpoint:
        """Return the checkpoint with another bound of decoding.

        Args:
            bound: Most price of the rules that generated tokens merge by; None for all rules.

        Raises:
            RuleSetError: If there is a bound and the rules have no prices.
        """
        config = self.config.model_copy(update={"decode_max_damage": bound})
        return replace(self, config=config)

    def noting(self, backbone: Backbone, reason: str) -> Checkpoint:
        """Return the checkpoint with a note that it is used with a backbone of another kind.

        Args:
            backbone: It must have the module's embedding size and the rules' tokenizer.
            reason: Why it is good enough.

        Raises:
            BackboneMismatchError: If its embeddings have another size.
            TokenizerMismatchError: If the tokenizer differs.
        """
        differences = self.backbone_differences(backbone)
        if not reason.strip() or backbone.hidden_size != self.config.hidden_size:
            self.check_backbone(backbone)
        self.check_vocabulary(backbone)
        if not differences:
            return self
        note = f"{reason} ({backbone.name}: {'; '.join(differences)})"
        _log.warning("umim: not the checkpoint's own backbone: %s", note)
        training = {**self.config.training, "backbone_mismatch": note}
        return replace(self, config=self.config.model_copy(update={"training": training}))

    def check_backbone(self, backbone: Backbone) -> None:
        """Refuse a backbone or tokenizer other than the checkpoint's own.

        Raises:
            BackboneMismatchError: If the weights or the architecture differ.
            TokenizerMismatchError: If the tokenizer differs.
            RuleSetError: If a rule holds a special token.
        """
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
        config, identity, known = self.config, backbone.identity, self.config.backbone_model
        if backbone.hidden_size != config.hidden_size:
            return [f"embedding size {config.hidden_size} -> {backbone.hidden_size}"]
        if config.backbone_fingerprint in identity.fingerprints:
            return []
        if known is None:
            return ["configuration or weights (this older checkpoint does not record which)"]
        return identity.differences(known.model_type, known.config, known.weights)

    def check_vocabulary(self, backbone: Backbone) -> None:
        """Refuse a tokenizer other than the checkpoint's own, and rules that do not fit it.

        Raises:
            TokenizerMismatchError: If the tokenizer differs.
            RuleSetError: If a rule holds a special token.
        """
        wanted = self.config.tokenizer_fingerprint
        if wanted and not backbone.has_tokenizer(wanted):
            raise TokenizerMismatchError(
                f"{self.config.backbone} must have the tokenizer {wanted[:12]}",
                backbone.tokenizer_fingerprint[:12],
                "Load the tokenizer of the backbone it was trained for.",
            )
        if not backbone.has_tokenizer(self.rules.origin.tokenizer_fingerprint):
            self.rules.check_tokenizer(backbone.tokenizer_fingerprint)
        check_vocabulary(self.rules, backbone.vocab_size, backbone.special_ids)

    def write(self, directory: Path) -> None:
        """Write the checkpoint's files into an existing, empty directory."""
        weights = {
            name: _single(value.detach()).cpu().contiguous()
            for name, value in self.module.state_dict().items()
        }
        write_json(directory / "config.json", self.config.model_dump(mode="json"))
        save_file(weights, directory / "model.safetensors")
        (directory / "model.safetensors").chmod(0o644)  # save_file leaves it to the owner alone
        (directory / "rules").mkdir()
        self.rules.write(directory / "rules")
        write_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, body={})

    def save(self, directory: str | Path) -> None:
        """Write the checkpoint directory; it must not exist yet.

        Raises:
            ArtifactError: If it exists or cannot be written.
        """
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, name: str | Path) -> Checkpoint:
        """Load a checkpoint by embedded name or directory.

        Raises:
            CheckpointError: If there is none, or its weights do not fit its configuration.
            ArtifactError: If it is torn, altered or of an unknown schema.
        """
        directory = resolve_checkpoint(name)
        read_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA)
        config = read_config(directory)
        with torch.device("meta"):  # a declared size allocates nothing and draws no weights
            module = MergeModule.of(config, config.hidden_size, config.num_heads)
        weights = _read_weights(directory / "model.safetensors", module, config.rule_rows)
        rules = RuleSet.load(directory / "rules")
        if config.rule_rows:
            module.rows = _rows(directory, weights, rules)
        module.load_state_dict(weights, assign=True)
        return cls(config, module.eval().requires_grad_(False), rules)


def _shape(module: MergeModule) -> dict[str, Any]:
    """Return the fields of a configuration that follow from the module."""
    return {
        "hidden_size": module.hidden_size,
        "num_heads": module.num_heads,
        "module_positions": module.positions,
        "depth": module.depth,
        "kind": module.kind,
        "residual": module.residual,
        "rule_rows": 0 if module.rows is None else len(module.rows),
    }


def _single(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in single precision, unless it holds ids."""
    return value.float() if value.is_floating_point() else value


def _rows(directory: Path, weights: dict[str, torch.Tensor], rules: RuleSet) -> RuleRows:
    """Return the rule rows that a checkpoint's weights hold, each of one of its rules."""
    try:
        rows = RuleRows.of(weights[_SPANS], weights[_TABLE])
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} must hold rule rows of spans", str(error), "Train it again."
        ) from error
    if (own := rows.of_rules(rules)) is not rows:
        raise CheckpointError(
            f"{directory} must hold rule rows of its own rules alone",
            f"{0 if own is None else len(own)} of {len(rows)} are",
            "Train it again.",
        )
    return rows


def _read_weights(path: Path, module: MergeModule, rule_rows: int) -> dict[str, torch.Tensor]:
    """Read exactly the tensors that module and rule rows have, checked before any is allocated."""
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    if rule_rows:
        wanted |= {_SPANS: (rule_rows, MAX_SPAN), _TABLE: (rule_rows, module.hidden_size)}
    limit = 2 * sum(4 * int(np.prod(shape)) for shape in wanted.values()) + (1 << 20)
    if path.stat().st_size > limit:
        raise CheckpointError(
            f"{path} must hold a module of size {module.hidden_size}",
            f"{path.stat().st_size} bytes, more than {limit}",
            "This is not a merge module; name another checkpoint.",
        )
    try:
        with safe_open(path, framework="pt") as stream:
            found = {key: tuple(stream.get_slice(key).get_shape()) for key in stream.keys()}  # noqa: SIM118
            if found != wanted:
                raise CheckpointError(
                    f"{path} must hold the tensors {sorted(wanted)}", found, "Train it again."
                )
            weights = {key: _single(stream.get_tensor(key)) for key in wanted}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} must be safetensors", str(error), "Train again.") from error
    if odd := [key for key, value in weights.items() if not bool(torch.isfinite(value).all())]:
        raise CheckpointError(f"{path} must hold finite weights", odd, "Train it again.")
    return weights
