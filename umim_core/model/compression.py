"""Display of a compressed text: its units, coloured in the terminal or as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from umim_core.backbone.tokenizer_files import load_tokenizer, special_ids, tokenizer_fingerprint
from umim_core.checkpoint.checkpoint_files import CHECKPOINT_SCHEMA, read_config, resolve_checkpoint
from umim_core.config.form import check_raw_tail
from umim_core.model.hub import fetch_checkpoint
from umim_core.model.showing import Decode, Piece, Shown, View, unit_texts
from umim_core.progress import numbered
from umim_core.rules.matcher import Matcher, segment_parts
from umim_core.rules.pruning import within_budget
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_manifest
from umim_core.text.token_ids import decode, encode


@dataclass(frozen=True)
class Compression(Shown):
    """One text cut into units.

    Attributes:
        ids: Raw token ids.
        units: Text of each unit, in order; together they are the text of the ids.
        unit_lengths: Raw tokens of each unit; more than 1 where a span was merged.
    """

    ids: tuple[int, ...]
    units: tuple[str, ...]
    unit_lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, ids: Sequence[int], matcher: Matcher, decode: Decode, raw_tail: int = 0
    ) -> Compression:
        """Cut raw ids [T] into units, ``raw_tail`` at the end raw; ``decode`` gives their texts."""
        check_raw_tail(raw_tail, "prompt")
        tokens = np.array(ids, dtype=np.int64)
        _, lengths = segment_parts(matcher.segment, tokens, raw_tail=raw_tail)
        sizes = tuple(lengths.tolist())
        return cls(ids=tuple(ids), units=unit_texts(ids, sizes, decode), unit_lengths=sizes)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Merged spans as (start, length) in raw tokens."""
        starts = accumulate(self.unit_lengths, initial=0)
        pairs = zip(starts, self.unit_lengths, strict=False)
        return tuple((start, length) for start, length in pairs if length > 1)

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens; 0 for an empty text."""
        return (len(self.ids) - len(self.units)) / len(self.ids) if self.ids else 0.0

    @property
    def summary(self) -> str:
        return (
            f"{numbered(len(self.ids), 'token')} -> {numbered(len(self.units), 'unit')}, "
            f"{numbered(len(self.spans), 'merged span')}, "
            f"token reduction {self.token_reduction:.1%}"
        )

    @property
    def views(self) -> tuple[View, ...]:
        pieces = map(Piece, self.units, self.unit_lengths)
        return (View(tuple(pieces), self.summary, "umim-compression"),)


def compress_text(text: str, checkpoint: str, raw_tail: int = 0) -> Compression:
    """Cut a text, which may be empty, into units by a checkpoint's rules, without weights or torch.

    The checkpoint is an embedded name, one's own, a directory or a hub repository; its own budget
    counts, if it has one. The last ``raw_tail`` tokens stay raw; special tokens are added as the
    tokenizer does.
    """
    directory = resolve_checkpoint(fetch_checkpoint(checkpoint))
    read_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, required=("config.json",))
    config = read_config(directory)
    tokenizer = load_tokenizer(config.backbone, revision=config.backbone_revision)
    rules = RuleSet.load(
        directory / "rules", tokenizer_fingerprint=tokenizer_fingerprint(tokenizer)
    )
    rules.check_vocabulary(len(tokenizer), special_ids(tokenizer))
    ids = encode(tokenizer, text, None)
    matcher = Matcher(within_budget(rules, config.budget))
    return Compression.of(ids, matcher, partial(decode, tokenizer), raw_tail)
