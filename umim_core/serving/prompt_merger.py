"""Prompts over the ids of an exported model: every span that merges becomes one id.

An exported model has a row for each of K spans behind its V rows, so a merged prompt is a prompt
like any other. With V = 100 and the spans (1, 2) and (5, 6, 7), their ids 100 and 101, raw tail 2::

    ids      9 1 2 5 6 7 3 1 2          ranges [(1, 9)]
    merged   9 100 101 3 1 2            the last two tokens of the range stay raw

Neither torch nor transformers is imported here: a gateway merges prompts in a small process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from umim_core.config.form import check_raw_tail
from umim_core.rules.matcher import Matcher, check_parts, segment_parts
from umim_core.serving.span_files import SpanTable
from umim_core.text.token_ids import prompt_array


class PromptMerger:
    """Merge prompts, ids in and ids out, by the spans of an exported model.

    Threads may share one.

    Attributes:
        vocab_size: Rows V of the model before the export; span i has the id V + i.
        span_count: Number of spans K.
        longest: Most tokens of one.
        raw_tail: Last tokens of each range that stay raw by default.
        roles: Whose contents of a chat may merge, as the checkpoint recommends; for ``write_chat``.
        fingerprint: SHA-256 of the tokenizer whose ids these are; "" if unknown.
    """

    def __init__(self, table: SpanTable) -> None:
        self._rules = table.rules
        self._matcher = Matcher(table.rules)
        self._spans, _ = table.padded()
        self.vocab_size = table.vocab_size
        self.span_count = len(table.rules)
        self.longest = table.rules.longest
        self.raw_tail, self.roles = table.raw_tail, table.roles
        self.fingerprint = table.fingerprint

    @classmethod
    def load(cls, directory: Path, *, tokenizer_fingerprint: str | None = None) -> PromptMerger:
        """Read the spans of an exported model: ``umim_spans.json`` and ``.table`` will do."""
        return cls(SpanTable.load(directory, tokenizer_fingerprint=tokenizer_fingerprint))

    def merge(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        ranges: Sequence[tuple[int, int]] | None = None,
        *,
        raw_tail: int | None = None,
    ) -> list[int]:
        """Merge the spans of a prompt.

        Args:
            ids: Raw ids [T], each below V.
            ranges: Tokens that may merge, as (first, end), in order and apart; each range is
                matched on its own. None: the whole prompt.
            raw_tail: Last tokens of each range that stay raw; None for the model's default.

        Returns:
            Ids below V + K; ``expand`` gives the raw ones back.
        """
        raw = prompt_array(ids, self.vocab_size)
        check_parts(ranges or (), len(raw))
        tail = self.raw_tail if raw_tail is None else raw_tail
        check_raw_tail(tail, "prompt")
        starts, lengths = segment_parts(self._matcher.segment, raw, ranges, tail)
        merged = raw[starts]
        for n in self._rules.orders:
            at = np.flatnonzero(lengths == n)
            if len(at):
                spans = raw[starts[at, None] + np.arange(n)]
                merged[at] = self.vocab_size + self._rules.places(spans)
        return [int(unit) for unit in merged]

    def expand(self, ids: Sequence[int] | NDArray[np.integer]) -> list[int]:
        """Return the raw ids that merged ones stand for."""
        merged = prompt_array(ids, self.vocab_size + self.span_count)
        index = np.maximum(merged - self.vocab_size, 0)
        rows = np.where((merged < self.vocab_size)[:, None], -1, self._spans[index])
        rows[:, 0] = np.where(merged < self.vocab_size, merged, rows[:, 0])
        return [int(token) for token in rows[rows >= 0]]
