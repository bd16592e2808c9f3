"""The rule set: spans of 2 to 4 token ids with their counts, and its directory on disk.

A rule directory holds ``rules.parquet`` (columns ``n`` int8, ``ids`` list<int32>, ``count`` int64,
sorted by (n, ids)), ``matcher/tables.npy`` (derived; where it is absent it is built in memory) and
``manifest.json``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError
from umim_core.rules.filters import Containment, Overlap, filter_rules
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.rules.matcher_tables import MatcherTables
from umim_core.rules.rules_table import Counts, Ids, check_order, read_table, write_table
from umim_core.store.artifacts import canonical_json, read_manifest, sha256_bytes, write_manifest
from umim_core.store.publication import publish_directory
from umim_core.text.token_ids import MAX_TOKEN_ID

RULES_SCHEMA: Final = 1
RuleSource = Literal["frequency", "confidence", "explicit"]
_TABLES: Final = "matcher/tables.npy"


class _Origin(BaseModel):
    """Fields of a rule set's manifest other than its files."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    tau: int | None
    overlap: Overlap
    containment: Containment
    segment_length: int | None
    tokenizer_fingerprint: str | None
    corpus_digest: str | None
    rules: dict[str, int] | None = None
    source: RuleSource = "frequency"
    min_documents: int | None = None


@dataclass(frozen=True)
class RuleSet:
    """Merge rules and where they come from.

    Attributes:
        ids_by_order: Rules [R_n, n] (int32), rows ascending, for n = 2, 3, 4.
        support_by_order: Corpus counts [R_n] (int64), aligned with the rules.
        tau: Least count asked for, or None (rules not made by a threshold).
        overlap: Overlap policy the rules were filtered with.
        containment: Containment policy the rules were filtered with.
        segment_length: Tokens per segment when counting, or None (ragged segments).
        tokenizer_fingerprint: Of the tokenizer whose ids these are, or None (unknown).
        corpus_digest: SHA-256 of the token ids counted, or None.
        source: What made them rules: counts, a language model's confidence, or a list of spans.
        min_documents: Least number of documents that a rule occurs in, or None (not asked for).
    """

    ids_by_order: dict[int, Ids]
    support_by_order: dict[int, Counts]
    tau: int | None = None
    overlap: Overlap = "greedy"
    containment: Containment = "drop"
    segment_length: int | None = None
    tokenizer_fingerprint: str | None = None
    corpus_digest: str | None = None
    source: RuleSource = "frequency"
    min_documents: int | None = None
    _tables: list[MatcherTables] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for n in ORDERS:
            check_order(n, self.ids_by_order.get(n), self.support_by_order.get(n), self.tau)

    def __repr__(self) -> str:
        """Return how many rules there are of each order, and how they were made."""
        orders = ", ".join(f"{count:,} of {n}" for n, count in self.counts_by_order.items())
        made = f"{self.source}, tau {self.tau}, {self.overlap}+{self.containment}"
        return f"RuleSet({len(self):,} rules: {orders} tokens; {made})"

    @classmethod
    def from_counts(
        cls,
        counts: NgramCounts,
        *,
        overlap: Overlap = "greedy",
        containment: Containment = "drop",
        tau: int | None = None,
        segment_length: int | None = None,
        tokenizer_fingerprint: str | None = None,
        corpus_digest: str | None = None,
        source: RuleSource = "frequency",
        min_documents: int | None = None,
    ) -> RuleSet:
        """Filter n-gram counts into rules.

        Args:
            counts: Frequent n-grams.
            overlap: ``greedy`` or ``none``.
            containment: ``drop`` or ``keep``.
            tau: A threshold above the one the counts were made with; None takes theirs.
            segment_length: Tokens per segment, recorded.
            tokenizer_fingerprint: Recorded.
            corpus_digest: Recorded.
            source: Recorded.
            min_documents: Recorded; the counts are taken as they are.

        Raises:
            RuleSetError: If ``tau`` is below the threshold of the counts.
        """
        threshold = counts.tau if tau is None else tau
        if threshold < counts.tau:
            raise RuleSetError(
                f"tau must be at least {counts.tau}, the threshold of the counts",
                threshold,
                "Count again with a smaller tau.",
            )
        ids: dict[int, Ids] = {}
        support: dict[int, Counts] = {}
        for n in ORDERS:
            enough = counts.support[n] >= threshold
            ids[n], support[n] = counts.ids(n)[enough], counts.support[n][enough]
        _, keep = filter_rules(ids, support, overlap, containment)
        return cls(
            {n: ids[n][keep[n]] for n in ORDERS},
            {n: support[n][keep[n]] for n in ORDERS},
            threshold,
            overlap,
            containment,
            segment_length,
            tokenizer_fingerprint,
            corpus_digest,
            source,
            min_documents,
        )

    @classmethod
    def from_spans(
        cls, spans: Iterable[tuple[int, ...]], tokenizer_fingerprint: str | None = None
    ) -> RuleSet:
        """Make a rule set of explicit spans, each with count 1 and no threshold."""
        unique = sorted(set(spans))
        if odd := [span for span in unique if len(span) not in ORDERS]:
            raise RuleSetError("a rule must have 2, 3 or 4 tokens", odd[0], "Drop this span.")
        if odd := [span for span in unique if min(span) < 0 or max(span) > MAX_TOKEN_ID]:
            raise RuleSetError(f"rule ids must lie in 0..{MAX_TOKEN_ID}", odd[0], "Drop this span.")
        ids = {
            n: np.array([s for s in unique if len(s) == n], dtype=np.int32).reshape(-1, n)
            for n in ORDERS
        }
        support = {n: np.ones(len(ids[n]), dtype=np.int64) for n in ORDERS}
        return cls(
            ids,
            support,
            overlap="none",
            containment="keep",
            tokenizer_fingerprint=tokenizer_fingerprint,
            source="explicit",
        )

    @property
    def counts_by_order(self) -> dict[int, int]:
        """Number of rules of each order."""
        return {n: len(self.ids_by_order[n]) for n in ORDERS}

    def __len__(self) -> int:
        return sum(self.counts_by_order.values())

    @property
    def infix_free(self) -> bool:
        """Whether no rule lies inside another: at most one rule starts or ends at a position."""
        return self.tables.infix_free

    @property
    def tables(self) -> MatcherTables:
        """The matcher's arrays: mapped from the rule directory, else built at the first call."""
        if not self._tables:
            self._tables.append(MatcherTables.build(self.ids_by_order))
        return self._tables[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the rules and their description."""
        parts = [canonical_json(self._description())]
        for n in ORDERS:
            parts.append(sha256_bytes(np.ascontiguousarray(self.ids_by_order[n]).tobytes()))
            parts.append(sha256_bytes(np.ascontiguousarray(self.support_by_order[n]).tobytes()))
        return sha256_bytes("\n".join(parts).encode())

    def _description(self) -> dict[str, object]:
        unusual: dict[str, object] = {}  # what is usual is left out: digests outlive new fields
        if self.source != "frequency":
            unusual["source"] = self.source
        if self.min_documents is not None:
            unusual["min_documents"] = self.min_documents
        return {
            **unusual,
            "tau": self.tau,
            "overlap": self.overlap,
            "containment": self.containment,
            "segment_length": self.segment_length,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "corpus_digest": self.corpus_digest,
            "rules": {str(n): count for n, count in self.counts_by_order.items()},
        }

    def check_tokenizer(self, fingerprint: str) -> None:
        """Refuse a tokenizer other than the one the rules were mined with.

        Raises:
            TokenizerMismatchError: If both fingerprints are known and differ.
        """
        if self.tokenizer_fingerprint not in (None, fingerprint):
            raise TokenizerMismatchError(
                f"these rules belong to the tokenizer {str(self.tokenizer_fingerprint)[:12]}",
                fingerprint[:12],
                "Mine rules with this tokenizer, or load the backbone they were mined for.",
            )

    def write(self, directory: Path) -> None:
        """Write the rule files into an existing, empty directory."""
        write_table(directory / "rules.parquet", self.ids_by_order, self.support_by_order)
        (directory / _TABLES).parent.mkdir()
        self.tables.write(directory / _TABLES, self.digest)
        write_manifest(directory, kind="rules", schema=RULES_SCHEMA, body=self._description())

    def save(self, directory: str | Path) -> None:
        """Write the rule directory; it must not exist yet.

        Raises:
            ArtifactError: If it exists or cannot be written.
        """
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, directory: str | Path, *, tokenizer_fingerprint: str | None = None) -> RuleSet:
        """Read a rule directory.

        Every byte is checked against the manifest's SHA-256 and every row against the format. The
        matcher's tables are mapped, not read into memory, and must carry the digest of these rules.

        Args:
            directory: What :meth:`save` wrote.
            tokenizer_fingerprint: If given, rules of another tokenizer are refused.

        Raises:
            ArtifactError: If the directory is missing, torn, altered or of an unknown schema, or
                if its tables are of other rules.
            RuleSetError: If its content breaks the format.
            TokenizerMismatchError: If it belongs to another tokenizer.
        """
        path = Path(directory)
        manifest = read_manifest(path, kind="rules", schema=RULES_SCHEMA)
        ids, support = read_table(path / "rules.parquet")
        try:
            origin = _Origin.model_validate(manifest)
        except ValidationError as error:
            raise ArtifactError(
                f"{path}/manifest.json must describe its rules",
                str(error.errors(include_url=False)[0]),
                "Mine them again.",
            ) from error
        rules = cls(
            ids,
            support,
            origin.tau,
            origin.overlap,
            origin.containment,
            origin.segment_length,
            origin.tokenizer_fingerprint,
            origin.corpus_digest,
            origin.source,
            origin.min_documents,
        )
        described = rules._description()["rules"]
        if origin.rules not in (None, described):
            raise RuleSetError(
                f"{path} must hold the rules its manifest counts, {origin.rules}",
                described,
                "Mine them again.",
            )
        if (path / _TABLES).exists():
            tables = MatcherTables.read(path / _TABLES, rules.digest, len(rules))
            rules._tables.append(tables)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return rules
