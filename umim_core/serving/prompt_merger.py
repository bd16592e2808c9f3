"""Prompts over the ids of an exported model: every span that merges becomes one id.

An exported model has a row for each of K spans behind its V rows, so a merged prompt is a prompt
like any other. With V = 100 and the spans (1, 2) and (5, 6, 7), their ids 100 and 101, raw tail 2::

    ids      9 1 2 5 6 7 3 1 2          ranges [(1, 9)]
    merged   9 100 101 3 1 2            the last two tokens of the range stay raw

Neither torch nor transformers is imported here: a gateway merges prompts in a small process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError, require
from umim_core.rules.matcher import Matcher, check_parts, segment_parts
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.span_files import (
    ADAPTERS,
    RECORD,
    REMEDY,
    TABLE,
    TOKENIZER,
    SpanRecord,
    read_record,
)
from umim_core.store.artifacts import sha256_bytes, sha256_file, write_json
from umim_core.store.disk import write_bytes
from umim_core.text.roles import USER, Role
from umim_core.text.token_ids import id_array


@dataclass(frozen=True, eq=False)
class PromptMerger:
    """Merges prompts, ids in and out, by the spans of an exported model; threads may share one."""

    rules: RuleSet  # the K spans; that at place i of the sorted ones has the id V + i
    vocab_size: int  # rows V of the model before the export
    raw_tail: int  # last tokens of each range that stay raw
    roles: tuple[Role, ...] = USER  # whose contents of a chat may merge; for ``write_chat``

    @classmethod
    def load(cls, directory: Path, *, tokenizer_fingerprint: str | None = None) -> PromptMerger:
        """Read ``umim_spans.json`` and ``.table``.

        A tokenizer, by file next to them or fingerprint, must be theirs.
        """
        record, path, beside = read_record(directory), directory / TABLE, directory / TOKENIZER
        same = not beside.is_file() or sha256_file(beside) == record.files.get(TOKENIZER)
        rule = f"{beside} must be the tokenizer that the spans were exported with"
        remedy = "Restore it, or export the model again."
        require(same, TokenizerMismatchError, rule, "another file", remedy)
        try:
            tensors = load_file(path)
            table, lengths = tensors["ids"], tensors["lengths"]
            rows = zip(table.tolist(), lengths.tolist(), strict=True)
            spans = [tuple(row[:n]) for row, n in rows]
            rules = RuleSet.from_spans(spans, record.tokenizer_fingerprint or None)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuleSetError) as error:
            raise ArtifactError(f"{path} must hold spans", str(error), REMEDY) from error
        merger = cls(rules, record.vocab_size, record.raw_tail, record.roles)
        behind = table[:, rules.longest :]  # no span need be as long as the longest may be
        same = np.array_equal(merger.spans, table[:, : rules.longest]) and (behind == -1).all()
        same = same and np.array_equal(rules.sizes, lengths)
        rule = f"{path} must hold {record.spans} spans of ids below {record.vocab_size}, sorted"
        fits = same and len(rules) == record.spans and int(table.max(initial=0)) < record.vocab_size
        require(bool(fits), ArtifactError, rule, f"another table, {table.shape}", REMEDY)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return merger

    def write(self, directory: Path) -> None:
        """Write both files into a directory that holds tokenizer and adapters already, if any."""
        lengths = self.rules.sizes.astype(np.int8)
        data = save({"ids": self.spans, "lengths": lengths})
        write_bytes(directory / TABLE, data)
        beside = [path for name in (TOKENIZER, ADAPTERS) if (path := directory / name).exists()]
        record = SpanRecord(
            format=1,
            policy=1,
            vocab_size=self.vocab_size,
            spans=len(self.rules),
            raw_tail=self.raw_tail,
            tokenizer_fingerprint=self.rules.origin.tokenizer_fingerprint or "",
            files={TABLE: sha256_bytes(data)} | {path.name: sha256_file(path) for path in beside},
            roles=self.roles,
        )
        write_json(directory / RECORD, record.model_dump())

    @cached_property
    def spans(self) -> NDArray[np.int32]:
        """Ids [K, N] of all spans, -1 behind their ends."""
        rows = [
            np.pad(ids, ((0, 0), (0, self.rules.longest - n)), constant_values=-1)
            for n, ids in self.rules.ids_by_order.items()
        ]
        return np.concatenate(rows)

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self.rules)

    def merge(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> list[int]:
        """Merge the spans of raw ids [T] below V; ``expand`` gives these back.

        Ranges are the tokens that may merge, as (first, end), in order and apart; each is matched
        on its own. None: the whole prompt.
        """
        raw = id_array(ids, self.vocab_size)
        check_parts(() if ranges is None else ranges, len(raw))
        starts, lengths = segment_parts(self._matcher.segment, raw, ranges, self.raw_tail)
        merged = raw[starts]
        for n in self.rules.orders:
            at = np.flatnonzero(lengths == n)
            if len(at):
                spans = raw[starts[at, None] + np.arange(n)]
                merged[at] = self.vocab_size + self.rules.places(spans)
        return [int(unit) for unit in merged]

    def expand(self, ids: Sequence[int] | NDArray[np.integer]) -> list[int]:
        """Return the raw ids that merged ones stand for."""
        merged = id_array(ids, self.vocab_size + len(self.rules))
        rows = self.spans[np.maximum(merged - self.vocab_size, 0)]
        raw = merged < self.vocab_size
        rows[raw] = -1
        rows[raw, 0] = merged[raw]
        return [int(token) for token in rows[rows >= 0]]
