"""Files of the spans that an exported model has rows for: ``umim_spans.json`` and ``.table``.

``umim_spans.table`` has the format of safetensors, not its suffix: vLLM reads every such file next
to a model as weights. It holds ``ids`` int32 [K, 4] (-1 behind a span's end) and ``lengths`` int8
[K]; row i is the span of the id ``vocab_size + i``, rows sorted by length, then ids. The JSON says
whose ids they are and how prompts merge::

    {"format": 1, "policy": 1, "vocab_size": 49152, "spans": 8192, "raw_tail": 16,
     "tokenizer_fingerprint": "5b09...", "files": {"umim_spans.table": "e3b0...", ...}}

``files`` has the SHA-256 of the spans, and of the tokenizer and the adapters next to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError
from umim_core.rules.grams import ORDERS
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import described, read_json, sha256_bytes, sha256_file, write_json
from umim_core.store.disk import write_bytes

RECORD: Final = "umim_spans.json"
TABLE: Final = "umim_spans.table"
TOKENIZER: Final = "tokenizer.json"
ADAPTERS: Final = "umim_adapters.table"  # see adapter_files
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
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: int
    policy: int
    vocab_size: PositiveInt
    spans: PositiveInt
    raw_tail: NonNegativeInt
    tokenizer_fingerprint: str
    files: dict[str, str]


@dataclass(frozen=True)
class SpanTable:
    """Spans of a model with V + K rows: that at place i of the sorted rules has the id V + i.

    The last ``raw_tail`` tokens of each part of a prompt stay raw.
    """

    rules: RuleSet
    vocab_size: int
    raw_tail: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer; "" where it is unknown."""
        return self.rules.origin.tokenizer_fingerprint or ""

    def padded(self) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Return the ids [K, 4] of all spans, -1 behind their ends, and their lengths [K]."""
        counts = [self.rules.counts_by_order[n] for n in ORDERS]
        rows = [
            np.pad(ids, ((0, 0), (0, ORDERS[-1] - n)), constant_values=-1)
            for n, ids in self.rules.ids_by_order.items()
        ]
        return np.concatenate(rows), np.repeat(np.array(ORDERS, np.int8), counts)

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
        )
        write_json(directory / RECORD, record.model_dump())

    @classmethod
    def load(cls, directory: Path, *, tokenizer_fingerprint: str | None = None) -> SpanTable:
        """Read both files; a tokenizer, by file next to them or fingerprint, must be theirs."""
        record = read_record(directory)
        path = directory / TABLE
        if not path.is_file():
            raise ArtifactError(f"{path.name} must lie next to {RECORD}", str(path), _REMEDY)
        if (digest := sha256_file(path)) != record.files.get(TABLE):
            raise ArtifactError(f"{path} must have the SHA-256 that {RECORD} says", digest, _REMEDY)
        beside = directory / TOKENIZER
        if beside.is_file() and sha256_file(beside) != record.files.get(TOKENIZER):
            raise TokenizerMismatchError(
                f"{beside} must be the tokenizer that the spans were exported with",
                "another file",
                "Restore it, or export the model again.",
            )
        rules = _read_table(path, record)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return cls(rules, record.vocab_size, record.raw_tail)


def read_record(directory: Path) -> SpanRecord:
    """Read ``umim_spans.json``."""
    path = directory / RECORD
    content = read_json(path)
    for name, known in (("format", FORMAT), ("policy", POLICY)):
        version = content.get(name) if isinstance(content, dict) else None
        if version != known:
            raise ArtifactError(
                f"{path} must have {name} {known}",
                version,
                "Use the version of umim that wrote it, or export the model again.",
            )
    with described(f"{path} must describe the spans of a model", _REMEDY):
        return SpanRecord.model_validate(content)


def _read_table(path: Path, record: SpanRecord) -> RuleSet:
    """Read the spans and check them against the format."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path} must hold tensors", str(error), _REMEDY) from error
    ids, lengths = tensors.get("ids"), tensors.get("lengths")
    shapes = None if ids is None or lengths is None else (ids.shape, lengths.shape)
    count = record.spans
    if ids is None or lengths is None or shapes != ((count, ORDERS[-1]), (count,)):
        raise ArtifactError(
            f"{path} must hold ids [{count}, {ORDERS[-1]}] and lengths [{count}]", shapes, _REMEDY
        )
    if not np.isin(lengths, ORDERS).all() or (np.diff(lengths) < 0).any():
        raise ArtifactError(f"{path} must hold spans of 2, 3 or 4 ids, sorted", path.name, _REMEDY)
    if ids.size and int(ids.max()) >= record.vocab_size:
        raise ArtifactError(
            f"span ids must lie in 0..{record.vocab_size - 1}", int(ids.max()), _REMEDY
        )
    by_order = {n: np.ascontiguousarray(ids[lengths == n, :n], dtype=np.int32) for n in ORDERS}
    support = {n: np.ones(len(rows), dtype=np.int64) for n, rows in by_order.items()}
    origin = RuleOrigin(
        overlap="none",
        containment="keep",
        tokenizer_fingerprint=record.tokenizer_fingerprint or None,
        source="explicit",
    )
    try:
        return RuleSet(by_order, support, origin)
    except RuleSetError as error:
        raise ArtifactError(f"{path} must hold sorted spans", str(error), _REMEDY) from error
