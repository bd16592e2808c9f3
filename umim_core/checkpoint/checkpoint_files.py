"""Files and configuration of a checkpoint directory, without its weights: light to import."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from umim_core.addresses import check_path
from umim_core.checkpoint.checkpoint_index import own_checkpoint, own_checkpoints
from umim_core.config.form import SAFE_MERGE, SAFE_RAW_TAIL, Merge, ModuleForm, check_raw_tail
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import (
    ArtifactError,
    BackboneError,
    CheckpointError,
    FetchHashError,
    did_you_mean,
    require,
)
from umim_core.store.artifacts import described, read_json
from umim_core.text.roles import USER, Role, check_roles

CHECKPOINT_SCHEMA: Final = 2
DEFAULT_CHECKPOINT: Final = "umim-smollm2-135m-adapters"
FALLBACK_CHECKPOINT: Final = "umim-docs-llama"
_log: Final = logging.getLogger("umim")
_MAX_HIDDEN: Final = 1 << 16
_MAX_TAIL: Final = 1 << 20


class BackboneRecord(BaseModel):
    """Parts of a backbone's fingerprint, so that a mismatch can be explained.

    The configuration is recorded as far as it decides what is computed, the weights by their
    SHA-256.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    config: dict[str, JsonValue]
    weights: str


class CheckpointConfig(ModuleForm):
    """Content of a checkpoint's ``config.json``.

    Attributes:
        unit_positions: Positions of units in the backbone, in training and ever after.
        backbone_fingerprint: SHA-256 of its architecture and weights; ``backbone_model`` explains.
        training: How it was trained (steps, seed, final losses), free form.
        decode_max_damage: Most price of the rules that generated tokens merge by, in nats per saved
            token, where a caller does not say it; None for all rules.
        budget: Most price of the rules that are used where a caller names neither a budget nor a
            token reduction; None for all rules.
        merge: What a generation merges, where a caller does not say it; prompts, unless the
            checkpoint says otherwise.
        raw_tail: Last tokens of a generation's prompt that stay raw, likewise 16.
        roles: Whose contents of a chat merge, likewise what users say alone.
    """

    hidden_size: Annotated[int, Field(ge=1, le=_MAX_HIDDEN)]
    num_heads: Annotated[int, Field(ge=1, le=_MAX_HIDDEN)]
    backbone: str
    backbone_revision: str | None = None
    backbone_fingerprint: str
    backbone_model: BackboneRecord
    tokenizer_fingerprint: str
    training: dict[str, str | int | float | None] = Field(default_factory=dict)
    decode_max_damage: Annotated[float | None, Field(allow_inf_nan=False)] = None
    budget: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    merge: Merge = SAFE_MERGE
    raw_tail: Annotated[int, Field(ge=0, le=_MAX_TAIL)] = SAFE_RAW_TAIL
    roles: Annotated[tuple[Role, ...], Field(exclude_if=USER.__eq__)] = USER

    @model_validator(mode="after")
    def _has_a_merged_prompt(self) -> Self:
        check_raw_tail(self.raw_tail, self.merge)
        check_roles(self.roles)
        return self

    def recommended(
        self, merge: Merge | None = None, raw_tail: int | None = None
    ) -> tuple[Merge, int]:
        """Return what is merged and the raw tail; a caller's own words come first, where not None.

        The recommended raw tail belongs to the recommended merge: with another one it is 0.
        """
        chosen = self.merge if merge is None else merge
        tail = self.raw_tail if chosen == self.merge != "none" else 0
        return chosen, tail if raw_tail is None else raw_tail


def read_config(directory: Path) -> CheckpointConfig:
    rule = f"{directory}/config.json must describe a merge checkpoint"
    with described(rule, "Train it again with this version.", CheckpointError):
        return CheckpointConfig.model_validate(read_json(directory / "config.json"))


def resolve_checkpoint(name: str | Path) -> Path:
    rule, remedy = "the name of a checkpoint must not be empty", "Leave it out for the default."
    require(bool(str(name)), CheckpointError, rule, "''", remedy)
    directory = named_place(name)
    for place in (directory, directory / "checkpoint"):
        if _is_checkpoint(place):
            return place
    check_path("checkpoint", str(name), CheckpointError)
    raise _no_checkpoint(Path(name))


def named_place(name: str | Path) -> Path:
    """Return the directory that a name stands for: embedded, one's own, else the path it is."""
    text = str(name)
    return embedded_path(text, "checkpoint") or own_checkpoint(text) or Path(name)


def named_config(name: str | Path) -> CheckpointConfig:
    """Return the configuration of a checkpoint that is named; nothing else of it is read."""
    return read_config(resolve_checkpoint(name))


def _is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is meant as a checkpoint; its content is checked on loading."""
    try:
        if not (directory / "config.json").exists():
            return False
        known = read_json(directory / "config.json")
    except (ArtifactError, OSError):
        return True  # torn: loading says what is wrong
    return not (isinstance(known, dict) and "model_type" in known)


def _no_checkpoint(path: Path) -> CheckpointError:
    """Say what a name stands for instead, and what to do."""
    shipped = embedded_names("checkpoint")
    known = [*shipped, *own_checkpoints()]
    rule = (
        f"a checkpoint must be one of {', '.join(shipped)}, a name that `umim path` "
        "lists, or a directory with config.json, model.safetensors and rules/"
    )
    if (path / "config.json").is_file() or (path.is_file() and path.suffix == ".gguf"):
        return CheckpointError(
            rule,
            f"{path}, a language model",
            "Name a checkpoint that was trained for it, or make one: "
            f"umim mine TEXTS --tokenizer {path} --out rules.",
        )
    if (path / "rules.parquet").is_file():
        return CheckpointError(
            rule,
            f"{path}, a rule directory",
            f"Train a checkpoint with these rules: umim train MODEL --rules {path}.",
        )
    if path.exists():
        return CheckpointError(rule, f"{path}, which holds none", "Check the path.")
    guess = did_you_mean(str(path), known)
    return CheckpointError(
        rule, f"{path}, which does not exist", guess or "Check the name; `umim path` lists them."
    )


def default_checkpoint(*, local_files_only: bool = False) -> str:
    """Return the checkpoint of commands and calls that name none.

    It is ``umim-smollm2-135m-adapters``, whose backbone is fetched if need be. Where that is
    impossible it is ``umim-docs-llama``, which needs no network, and a line on stderr says so.
    """
    from umim_core.model_sources.model_cache import packaged_directory  # imports numpy

    directory = embedded_path(DEFAULT_CHECKPOINT, "checkpoint")
    if directory is None:
        return FALLBACK_CHECKPOINT
    backbone = read_config(directory).backbone
    try:
        packaged_directory(backbone, local_files_only=local_files_only)
    except FetchHashError:  # within reach, but not to be trusted
        raise
    except (BackboneError, ArtifactError) as error:
        _log.warning(
            "umim: using %s, since %s is not here (%s; got %s). For %s: umim fetch %s",
            *(FALLBACK_CHECKPOINT, backbone, error.rule, error.value),
            *(DEFAULT_CHECKPOINT, backbone),
        )
        return FALLBACK_CHECKPOINT
    return DEFAULT_CHECKPOINT
