"""The rule set: spans of 2 to 4 token ids with their counts, and its directory on disk.

A rule directory holds ``rules.parquet`` (columns ``n`` int8, ``ids`` list<int32>, ``count`` int64,
sorted by (n, ids)), ``matcher/tables.npy`` (derived; where it is absent it is built in memory),
``manifest.json`` and, where they were measured, ``prices.npy`` (float32 [R]).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import RuleSetError, TokenizerMismatchError
from umim_core.rules.filters import filter_rules
from umim_core.rules.grams import ORDERS, NgramCounts, check_tau
from umim_core.rules.matcher_tables import MatcherTables
from umim_core.rules.origin import DescribedRules, RuleOrigin
from umim_core.rules.rules_table import Counts, Ids, check_order, read_table, write_table
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import (
    canonical_json,
    described,
    read_manifest,
    sha256_bytes,
    write_manifest,
)
from umim_core.store.publication import publish_directory
from umim_core.text.token_ids import MAX_TOKEN_ID

RULES_SCHEMA: Final = 1
_TABLES: Final = "matcher/tables.npy"
_PRICES: Final = "prices.npy"
Prices = NDArray[np.float32]


def write_prices(directory: Path, prices: Prices) -> None:
    """Write the prices into a rule directory."""
    save_array(directory / _PRICES, prices)


@dataclass(frozen=True)
class RuleSet:
    """Merge rules and where they come from.

    Attributes:
        ids_by_order: Rules [R_n, n] (int32), rows ascending, for n = 2, 3, 4.
        support_by_order: Corpus counts [R_n] (int64), aligned with the rules.
        origin: Threshold, filters, tokenizer, corpus.
        prices: Price of each rule [R] (float32), rules sorted by n, then ids; None: not measured.
    """

    ids_by_order: dict[int, Ids]
    support_by_order: dict[int, Counts]
    origin: RuleOrigin = field(default_factory=RuleOrigin)
    prices: Prices | None = None
    _tables: list[MatcherTables] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for n in ORDERS:
            check_order(n, self.ids_by_order.get(n), self.support_by_order.get(n), self.origin.tau)
        if self.prices is None:
            return
        right = self.prices.shape == (len(self),) and self.prices.dtype == np.float32
        if not right or not np.isfinite(self.prices).all():
            wrong = f"{self.prices.dtype} {self.prices.shape}"
            raise RuleSetError(
                f"prices of rules must be {len(self)} finite float32 numbers, one a rule",
                "a number that is not finite" if right else wrong,
                "Measure them with umim prune CHECKPOINT TEXTS --keep-all.",
            )

    def __repr__(self) -> str:
        """Return how many rules there are of each order, and how they were made."""
        orders = ", ".join(f"{count:,} of {n}" for n, count in self.counts_by_order.items())
        origin = self.origin
        origin_text = f"{origin.source}, tau {origin.tau}, {origin.overlap}+{origin.containment}"
        return f"RuleSet({len(self):,} rules: {orders} tokens; {origin_text})"

    @classmethod
    def from_counts(cls, counts: NgramCounts, origin: RuleOrigin | None = None) -> RuleSet:
        """Filter n-gram counts into rules.

        ``origin`` names filters, what is recorded, and a threshold above the one the counts were
        made with; None, or without one, takes theirs.
        """
        recorded = origin or RuleOrigin()
        tau = counts.tau if recorded.tau is None else recorded.tau
        if tau < counts.tau:
            raise RuleSetError(
                f"tau must be at least {counts.tau}, the threshold of the counts",
                tau,
                "Count again with a smaller tau.",
            )
        ids = {n: counts.ids(n) for n in ORDERS}
        return cls.filtered(ids, counts.support, recorded.model_copy(update={"tau": tau}))

    @classmethod
    def filtered(
        cls, ids: dict[int, Ids], support: dict[int, Counts], origin: RuleOrigin
    ) -> RuleSet:
        """Make rules of the spans that reach the threshold of ``origin`` and pass its filters.

        Spans [R_n, n] per order come with rows ascending, and their counts [R_n].
        """
        tau = 1 if origin.tau is None else check_tau(origin.tau)
        enough = {n: support[n] >= tau for n in ORDERS}
        ids = {n: ids[n][enough[n]] for n in ORDERS}
        support = {n: support[n][enough[n]] for n in ORDERS}
        _, keep = filter_rules(ids, support, origin.overlap, origin.containment)
        remaining = {n: ids[n][keep[n]] for n in ORDERS}
        return cls(remaining, {n: support[n][keep[n]] for n in ORDERS}, origin)

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
        origin = RuleOrigin(
            overlap="none",
            containment="keep",
            tokenizer_fingerprint=tokenizer_fingerprint,
            source="explicit",
        )
        return cls(ids, support, origin)

    @property
    def counts_by_order(self) -> dict[int, int]:
        """Number of rules of each order."""
        return {n: len(self.ids_by_order[n]) for n in ORDERS}

    def __len__(self) -> int:
        return sum(self.counts_by_order.values())

    @property
    def infix_free(self) -> bool:
        """Whether no rule lies inside another: at most one rule starts or ends at a position."""
        return self.tables.infix_free(self.ids_by_order)

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
        rules = {str(n): count for n, count in self.counts_by_order.items()}
        return self.origin.described() | {"rules": rules}

    def take(self, kept: NDArray[np.bool_]) -> RuleSet:
        """Return those rules that are kept [R], with their prices, of the same origin.

        What the cheapest of all rules save is no longer recorded: fewer rules save another share.
        """
        borders = np.cumsum(list(self.counts_by_order.values()))[:-1]
        parts = dict(zip(ORDERS, np.split(kept, borders), strict=True))
        unrecorded = {"price_steps": (), "price_reductions": ()}
        return replace(
            self,
            origin=self.origin.model_copy(update=unrecorded),
            ids_by_order={n: self.ids_by_order[n][parts[n]] for n in ORDERS},
            support_by_order={n: self.support_by_order[n][parts[n]] for n in ORDERS},
            prices=None if self.prices is None else self.prices[kept],
        )

    def require_prices(self) -> Prices:
        """Return the price of each rule [R]."""
        if self.prices is None:
            raise RuleSetError(
                "a bound on damage needs the price of every rule",
                f"{len(self):,} rules without prices",
                "Measure them: umim prune CHECKPOINT TEXTS --keep-all.",
            )
        return self.prices

    def places(self, spans: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the places [M] of rules of one order [M, n] in the set, sorted by n, then ids."""
        own = self.ids_by_order[spans.shape[1]]
        indices = np.searchsorted(_sort_keys(own), _sort_keys(spans))
        known = indices < len(own)
        known[known] = (own[indices[known]] == spans[known]).all(axis=1)
        if not known.all():
            raise RuleSetError("spans must be rules of the set", spans[~known][0].tolist())
        shorter = sum(count for n, count in self.counts_by_order.items() if n < spans.shape[1])
        return np.asarray(shorter + indices, dtype=np.int64)

    def check_tokenizer(self, fingerprint: str, named: str | None = None) -> None:
        """Refuse a tokenizer other than the one the rules were mined with.

        Messages call it ``named``, or by the first digits of its fingerprint.
        """
        own = self.origin.tokenizer_fingerprint
        if own not in (None, fingerprint):
            raise TokenizerMismatchError(
                f"these rules belong to the tokenizer {str(own)[:12]}",
                named or fingerprint[:12],
                "Mine rules with this tokenizer, or load the backbone they were mined for.",
            )

    def write(self, directory: Path) -> None:
        """Write the rule files into an existing, empty directory."""
        write_table(directory / "rules.parquet", self.ids_by_order, self.support_by_order)
        (directory / _TABLES).parent.mkdir()
        self.tables.write(directory / _TABLES, self.digest, self.ids_by_order)
        if self.prices is not None:
            write_prices(directory, self.prices)
        body = self._description() | self.origin.recorded()
        write_manifest(directory, kind="rules", schema=RULES_SCHEMA, body=body)

    def save(self, directory: str | Path) -> None:
        """Write the rule directory; it must not exist yet."""
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, directory: str | Path, *, tokenizer_fingerprint: str | None = None) -> RuleSet:
        """Read what :meth:`save` wrote; rules of another tokenizer than the one given are refused.

        Every byte is checked against the manifest's SHA-256 and every row against the format. The
        matcher's tables are mapped, not read into memory, and must carry the digest of these rules.
        """
        path = Path(directory)
        manifest = read_manifest(
            path, kind="rules", schema=RULES_SCHEMA, required=("rules.parquet",)
        )
        listed = cast("dict[str, object]", manifest["files"])
        ids, support = read_table(path / "rules.parquet")
        with described(f"{path}/manifest.json must describe its rules", "Mine them again."):
            origin = DescribedRules.model_validate(manifest)
        recorded = RuleOrigin(**origin.model_dump(exclude={"rules"}))
        prices = np.array(open_array(path / _PRICES)) if _PRICES in listed else None
        rules = cls(ids, support, recorded, prices)
        content = rules._description()["rules"]
        if origin.rules not in (None, content):
            raise RuleSetError(
                f"{path} must hold the rules its manifest counts, {origin.rules}",
                content,
                "Mine them again.",
            )
        if _TABLES in listed:
            tables = MatcherTables.read(path / _TABLES, rules.digest, ids)
            rules._tables.append(tables)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return rules


def _sort_keys(spans: NDArray[np.integer]) -> NDArray[np.bytes_]:
    """Return keys [M] of spans [M, n] that sort as the spans do: their bytes, the highest first."""
    width = spans.shape[1]
    return np.ascontiguousarray(spans, dtype=">i4").reshape(-1).view(f"S{4 * width}")
