"""Files of an exported model beside its weights: its spans, and adapters of them if it has any.

``umim_spans.table`` and ``umim_adapters.table`` have the format of safetensors, not its suffix:
vLLM reads every such file next to a model as weights. The first holds ``ids`` int32 [K, N] (-1
behind a span's end, N the most tokens of one, 4 to 16) and ``lengths`` int8 [K]; row i is the span
of the id ``vocab_size + i``, rows sorted by length, then ids. The second holds a pair per linear
map of a layer, all layers in one, float32: ``self_attn.q_proj.down`` [layers, in, r],
``self_attn.q_proj.up`` [layers, r, out], ...

``umim_spans.json`` says whose ids they are and how prompts merge, with the SHA-256 of the tables
and of the tokenizer::

    {"format": 1, "policy": 1, "vocab_size": 49152, "spans": 8192, "raw_tail": 16,
     "tokenizer_fingerprint": "5b09...", "files": {"umim_spans.table": "e3b0...", ...}}

An engine that does not know adapters would read merged spans wrongly and say nothing. So the
model's configuration then names a type and an architecture that vLLM's plugin alone registers. The
plugin imports this module: numba, which rules load, must not come with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, Strict
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError, require
from umim_core.rules.grams import LONGEST, MAX_LONGEST, orders_to
from umim_core.store.artifacts import described, read_json, sha256_bytes, sha256_file, write_json
from umim_core.store.disk import write_bytes
from umim_core.text.roles import USER, Role

if TYPE_CHECKING:
    from torch import Tensor

    from umim_core.merging.adapters import SpanAdapters
    from umim_core.rules.ruleset import RuleSet

RECORD: Final = "umim_spans.json"
TABLE: Final = "umim_spans.table"
TOKENIZER: Final = "tokenizer.json"
ADAPTERS: Final = "umim_adapters.table"
# Model types whose adapters vLLM's plugin applies, and the architecture that it registers for each.
ARCHITECTURES: Final = {"llama": "UmimLlamaForCausalLM", "qwen2": "UmimQwen2ForCausalLM"}
TYPE: Final = "umim_{}"  # model_type of a configuration with adapters
_CONFIG: Final = "config.json"
FORMAT: Final = 1  # of the two files
POLICY: Final = 1  # longest span first, left to right, every part of a prompt on its own
_REMEDY: Final = "Export the model again."


class SpanRecord(BaseModel):
    """Content of ``umim_spans.json``, see above.

    Attributes:
        format: Version of the two files.
        policy: Version of the way in which prompts merge.
        vocab_size: Rows V of the model before the export; span i has the id V + i.
        raw_tail: Last tokens of each part of a prompt that stay raw, unless a caller says it.
        roles: Whose contents of a chat are such parts, likewise.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: int
    policy: int
    vocab_size: PositiveInt
    spans: PositiveInt
    raw_tail: NonNegativeInt
    tokenizer_fingerprint: str
    files: dict[str, str]
    roles: Annotated[tuple[Role, ...], Strict(False), Field(exclude_if=USER.__eq__)] = USER


@dataclass(frozen=True)
class SpanTable:
    """Spans of a model with V + K rows: that at place i of the sorted rules has the id V + i.

    The last ``raw_tail`` tokens of each part of a prompt stay raw; of a chat, parts are contents of
    these ``roles``.
    """

    rules: RuleSet
    vocab_size: int
    raw_tail: int
    roles: tuple[Role, ...] = USER

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer; "" where it is unknown."""
        return self.rules.origin.tokenizer_fingerprint or ""

    def padded(self) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the ids [K, N] of all spans, -1 behind their ends, and their lengths [K]."""
        rows = [
            np.pad(ids, ((0, 0), (0, self.rules.longest - n)), constant_values=-1)
            for n, ids in self.rules.ids_by_order.items()
        ]
        return np.concatenate(rows), self.rules.sizes.astype(np.int8)

    def write(self, directory: Path) -> None:
        """Write both files into a directory that holds tokenizer and adapters already, if any."""
        ids, lengths = self.padded()
        data = save({"ids": ids, "lengths": lengths})
        write_bytes(directory / TABLE, data)
        beside = [path for name in (TOKENIZER, ADAPTERS) if (path := directory / name).exists()]
        files = {TABLE: sha256_bytes(data)} | {path.name: sha256_file(path) for path in beside}
        record = SpanRecord(
            format=FORMAT,
            policy=POLICY,
            vocab_size=self.vocab_size,
            spans=len(self.rules),
            raw_tail=self.raw_tail,
            tokenizer_fingerprint=self.fingerprint,
            files=files,
            roles=self.roles,
        )
        write_json(directory / RECORD, record.model_dump())

    @classmethod
    def load(cls, directory: Path, *, tokenizer_fingerprint: str | None = None) -> SpanTable:
        """Read both files; a tokenizer, by file next to them or fingerprint, must be theirs."""
        record, path, beside = read_record(directory), directory / TABLE, directory / TOKENIZER
        rule = f"{path.name} must lie next to {RECORD}"
        require(path.is_file(), ArtifactError, rule, str(path), _REMEDY)
        _check_digest(path, record)
        same = not beside.is_file() or sha256_file(beside) == record.files.get(TOKENIZER)
        rule = f"{beside} must be the tokenizer that the spans were exported with"
        remedy = "Restore it, or export the model again."
        require(same, TokenizerMismatchError, rule, "another file", remedy)
        rules = _read_table(path, record)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return cls(rules, record.vocab_size, record.raw_tail, record.roles)


def read_record(directory: Path) -> SpanRecord:
    path = directory / RECORD
    content = read_json(path)
    remedy = "Use the version of umim that wrote it, or export the model again."
    for name, known in (("format", FORMAT), ("policy", POLICY)):
        version = content.get(name) if isinstance(content, dict) else None
        require(
            version == known, ArtifactError, f"{path} must have {name} {known}", version, remedy
        )
    with described(f"{path} must describe the spans of a model", _REMEDY):
        return SpanRecord.model_validate(content)


def _check_digest(path: Path, record: SpanRecord) -> None:
    digest = sha256_file(path) if path.is_file() else "no file"
    rule = f"{path} must have the SHA-256 that {RECORD} says"
    require(digest == record.files.get(path.name), ArtifactError, rule, digest, _REMEDY)


def _read_table(path: Path, record: SpanRecord) -> RuleSet:
    """Read the spans and check them against the format."""
    from umim_core.rules.ruleset import RuleOrigin, RuleSet

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path} must hold tensors", str(error), _REMEDY) from error
    count, size = record.spans, record.vocab_size
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    width = shapes.get("ids", (0, 0))[-1]
    fits = shapes == {"ids": (count, width), "lengths": (count,)}
    rule = f"{path} must hold ids [{count}, {LONGEST} to {MAX_LONGEST}] and lengths [{count}]"
    require(fits and LONGEST <= width <= MAX_LONGEST, ArtifactError, rule, shapes, _REMEDY)
    ids, lengths, orders = tensors["ids"], tensors["lengths"], orders_to(width)
    sorted_lengths = np.isin(lengths, orders).all() and not (np.diff(lengths) < 0).any()
    rule = f"{path} must hold spans of 2 to {width} ids, sorted"
    require(bool(sorted_lengths), ArtifactError, rule, path.name, _REMEDY)
    most = int(ids.max(initial=0))
    require(most < size, ArtifactError, f"span ids must lie in 0..{size - 1}", most, _REMEDY)
    by_order = {n: np.ascontiguousarray(ids[lengths == n, :n], dtype=np.int32) for n in orders}
    support = {n: np.ones(len(rows), dtype=np.int64) for n, rows in by_order.items()}
    origin = RuleOrigin(tokenizer_fingerprint=record.tokenizer_fingerprint or None)
    try:
        return RuleSet(by_order, support, origin)
    except RuleSetError as error:
        raise ArtifactError(f"{path} must hold sorted spans", str(error), _REMEDY) from error


def write_adapters(directory: Path, adapters: SpanAdapters, model_type: str) -> None:
    """Write adapters next to a model, and let its configuration name their architecture.

    The record of its spans is written after this; the model's type is a key of ``ARCHITECTURES``.
    """
    from safetensors.torch import save as save_tensors

    tensors = {
        f"{name.replace('-', '.')}.{part}": matrices.detach().float().cpu().contiguous()
        for part, by_name in (("down", adapters.down), ("up", adapters.up))
        for name, matrices in by_name.items()
    }
    write_bytes(directory / ADAPTERS, save_tensors(tensors))
    config = json.loads((directory / _CONFIG).read_bytes())
    names = {"model_type": TYPE.format(model_type), "architectures": [ARCHITECTURES[model_type]]}
    write_json(directory / _CONFIG, config | names)


def read_adapters(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices [layers, in, r] and [layers, r, out] of each linear map by its name."""
    from safetensors.torch import load_file as load_tensors

    path = directory / ADAPTERS
    _check_digest(path, read_record(directory))
    try:
        tensors = load_tensors(path)
        names = [name.removesuffix(".down") for name in tensors if name.endswith(".down")]
        return {name: (tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{path} must hold pairs of matrices", str(error), _REMEDY) from error
