"""The rule set: spans of 2 to 16 token ids with their counts, and its directory on disk.

A rule directory holds ``rules.parquet`` (columns ``n`` int8, ``ids`` list<int32>, ``count`` int64,
sorted by (n, ids)), ``manifest.json`` and, where they were measured, ``prices.npy`` (float32 [R]).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Strict

from umim_core.config.rule_options import EXPLICIT, RuleOptions
from umim_core.errors import ArtifactError, RuleSetError, TokenizerMismatchError, require
from umim_core.rules.filters import filter_rules
from umim_core.rules.grams import MAX_LONGEST, NgramCounts, check_longest, orders_to, pack_spans
from umim_core.rules.trie import MatcherTables, holds_shorter, read_only_rows
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import (
    canonical_json,
    described,
    read_manifest,
    sha256_bytes,
    write_manifest,
)
from umim_core.store.disk import unwritable
from umim_core.store.publication import publish_directory
from umim_core.text.token_ids import MAX_TOKEN_ID, Ids, Ints

RULES_SCHEMA: Final = 2
TABLE: Final = "rules.parquet"
TABLE_SCHEMA: Final = pa.schema(
    [("n", pa.int8()), ("ids", pa.list_(pa.int32())), ("count", pa.int64())]
)
MAX_RULES: Final = 100_000_000
_ROW_BYTES: Final = 13  # of n, count and the list's offset
_FREE_BYTES: Final = 64 << 20
_MOST_EXPANSION: Final = 64
_PRICES: Final = "prices.npy"
Prices = NDArray[np.float32]

# Options that a manifest records; how rules were made counts for their digest, with tokenizer and
# corpus. What else is known of them may be found out later.
_MADE_BY: Final = ("tau", "overlap", "containment", "segment_length", "source", "min_documents")
_OPTIONS: Final = (*_MADE_BY, "protect", "min_probability")


class RuleOrigin(BaseModel):
    """Origin of rules, as the manifest of a rule directory records it.

    Attributes:
        options: How they were found; a list of spans, if not said otherwise.
        tokenizer_fingerprint: Of the tokenizer whose ids these are, or None (unknown).
        corpus_digest: SHA-256 of the token ids counted, or None.
        max_damage: Most price of a rule: estimated nats of KL per occurrence, over the tokens that
            one saves; None (not pruned by damage).
        price_steps: Prices, rising, for which the next field has the token reduction; empty where
            rules have no prices.
        price_reductions: Token reduction of held-out text by the rules of at most each price.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    options: RuleOptions = EXPLICIT
    tokenizer_fingerprint: str | None = None
    corpus_digest: str | None = None
    max_damage: float | None = None
    price_steps: Annotated[tuple[float, ...], Strict(False)] = ()
    price_reductions: Annotated[tuple[float, ...], Strict(False)] = ()

    def with_options(self, changes: Mapping[str, object]) -> Self:
        return self.model_copy(update={"options": self.options.model_copy(update=dict(changes))})

    def record(self) -> dict[str, object]:
        """Return what a manifest holds: null for an option that nobody asked for."""
        options = self.options
        null_unless_asked = {
            "tau": None if options.source == "explicit" else options.tau,
            "min_documents": options.min_documents if options.count_documents else None,
            "min_probability": options.min_probability if options.source == "confidence" else None,
        }
        described = options.model_dump(mode="json", include=set(_OPTIONS)) | null_unless_asked
        return described | self.model_dump(mode="json", exclude={"options"})

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> Self:
        """Read what :meth:`record` returned, whatever else a manifest holds."""
        unasked = EXPLICIT.model_dump(include={"tau", "min_documents", "min_probability"})
        options = {name: record.get(name) for name in _OPTIONS}  # null: nobody asked for it
        options |= {name: value for name, value in unasked.items() if options[name] is None}
        if isinstance(options["protect"], list):
            options["protect"] = tuple(options["protect"])
        made = RuleOptions.model_validate(options, strict=True)
        found = {name: record[name] for name in cls.model_fields if name in record}
        return cls.model_validate({"options": made} | found)


@dataclass(frozen=True)
class RuleSet:
    """Merge rules and where they come from.

    Attributes:
        ids_by_order: Rules [R_n, n] (int32), rows ascending, for n = 2 .. ``longest``, a property
            of the set: its form has so many offsets, even where no rule is that long.
        support_by_order: Corpus counts [R_n] (int64), aligned with the rules.
        origin: Threshold, filters, tokenizer, corpus.
        prices: Price of each rule [R] (float32), rules sorted by n, then ids; None: not measured.
    """

    ids_by_order: dict[int, Ids]
    support_by_order: dict[int, Ints]
    origin: RuleOrigin = field(default_factory=RuleOrigin)
    prices: Prices | None = None

    def __post_init__(self) -> None:
        check_longest(self.longest)
        orders = (tuple(self.ids_by_order), tuple(self.support_by_order))
        rule = "a rule set must have all orders from 2 on, in both its dicts"
        require(set(orders) == {orders_to(self.longest)}, RuleSetError, rule, orders)
        for n, ids in self.ids_by_order.items():
            _check_order(n, ids, self.support_by_order[n], self.options.tau)
        if self.prices is None:
            return
        sized = self.prices.shape == (len(self),) and self.prices.dtype == np.float32
        rule = f"prices of rules must be {len(self)} finite float32 numbers, one a rule"
        found = "not finite" if sized else f"{self.prices.dtype} {self.prices.shape}"
        remedy = "Measure them with umim prune CHECKPOINT TEXTS --keep-all."
        require(sized and bool(np.isfinite(self.prices).all()), RuleSetError, rule, found, remedy)

    def __repr__(self) -> str:
        orders = ", ".join(
            f"{count:,} of {n}" for n, count in self.counts_by_order.items() if count
        )
        made = self.options
        how = f"{made.source}, tau {made.tau}, {made.overlap}+{made.containment}"
        return f"RuleSet({len(self):,} rules: {orders} tokens; {how})"

    @classmethod
    def from_counts(cls, counts: NgramCounts, origin: RuleOrigin) -> RuleSet:
        """Filter n-gram counts into rules.

        The options of ``origin`` name filters and a threshold, that of the counts or a higher one.
        """
        return cls.filtered(*counts.frequent(origin.options.tau), origin)[0]

    @classmethod
    def filtered(
        cls, ids: dict[int, Ids], support: dict[int, Ints], origin: RuleOrigin
    ) -> tuple[RuleSet, dict[int, int]]:
        """Make rules of the spans that reach the threshold of ``origin`` and pass its filters.

        Spans [R_n, n] per order come with rows ascending, and their counts [R_n].

        Returns:
            The rules, and how many spans of each order pass the overlap filter.
        """
        options = origin.options
        enough = {n: support[n] >= options.tau for n in ids}
        ids = {n: ids[n][enough[n]] for n in ids}
        support = {n: support[n][enough[n]] for n in ids}
        passed, keep = filter_rules(ids, support, options.overlap, options.containment)
        remaining = {n: ids[n][keep[n]] for n in ids}
        rules = cls(remaining, {n: support[n][keep[n]] for n in ids}, origin)
        return rules, {n: int(passed[n].sum()) for n in ids}

    @classmethod
    def from_spans(
        cls, spans: Iterable[tuple[int, ...]], tokenizer_fingerprint: str | None = None
    ) -> RuleSet:
        """Make a rule set of explicit spans, each with count 1 and no threshold.

        It is for rules of the longest span, at least 4 tokens.
        """
        given: list[Any] = list(spans)
        for span in given:
            rule = f"a rule must have 2 to {MAX_LONGEST} tokens, whole numbers in a tuple"
            fits = isinstance(span, tuple) and 2 <= len(span) <= MAX_LONGEST
            fits = fits and all(isinstance(i, int | np.integer) for i in span)
            require(fits, RuleSetError, rule, span, "Drop this span.")
            _check_range(min(span), max(span), span, "Drop this span.")
        unique: list[tuple[int, ...]] = sorted(set(given))
        ids = {
            n: np.array([s for s in unique if len(s) == n], dtype=np.int32).reshape(-1, n)
            for n in orders_to(max(map(len, unique), default=0))
        }
        support = {n: np.ones(len(ids[n]), dtype=np.int64) for n in ids}
        origin = RuleOrigin(tokenizer_fingerprint=tokenizer_fingerprint)
        return cls(ids, support, origin.with_options({"longest": max(ids)}))

    @property
    def options(self) -> RuleOptions:
        return self.origin.options

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(self.ids_by_order)

    @property
    def longest(self) -> int:
        """The most tokens that a rule of this set may have, at least 4."""
        return max(self.ids_by_order, default=0)

    @property
    def counts_by_order(self) -> dict[int, int]:
        return {n: len(ids) for n, ids in self.ids_by_order.items()}

    @property
    def support(self) -> Ints:
        """Corpus counts of all rules [R], sorted by n, then ids."""
        return np.concatenate(list(self.support_by_order.values()))

    @property
    def sizes(self) -> Ints:
        """Tokens of each rule [R]."""
        return np.repeat(np.array(self.orders), list(self.counts_by_order.values()))

    def first_place(self, order: int) -> int:
        """Return the place of the first rule of an order: how many shorter ones there are."""
        return sum(count for n, count in self.counts_by_order.items() if n < order)

    def __len__(self) -> int:
        return sum(self.counts_by_order.values())

    @property
    def infix_free(self) -> bool:
        """Whether no rule lies inside another: at most one rule starts or ends at a position."""
        slots = self.tables.slots
        return not any(holds_shorter(ids, slots) for ids in read_only_rows(self.ids_by_order))

    @cached_property
    def tables(self) -> MatcherTables:
        """The matcher's arrays, built at the first call."""
        return MatcherTables.build(self.ids_by_order)

    @property
    def digest(self) -> str:
        """SHA-256 of the rules and of how they were made."""
        record = self.origin.record()
        counted = (*_MADE_BY, "tokenizer_fingerprint", "corpus_digest")
        parts = [canonical_json({name: record[name] for name in counted})]
        for n in self.orders:
            parts.append(sha256_bytes(np.ascontiguousarray(self.ids_by_order[n]).tobytes()))
            parts.append(sha256_bytes(np.ascontiguousarray(self.support_by_order[n]).tobytes()))
        return sha256_bytes("\n".join(parts).encode())

    def with_prices(self, prices: Prices | None) -> RuleSet:
        return self._with_tables(replace(self, prices=prices))

    def with_origin(self, origin: RuleOrigin) -> RuleSet:
        return self._with_tables(replace(self, origin=origin))

    def _with_tables(self, same: RuleSet) -> RuleSet:
        """Let a set of the same rules share the tables that were built."""
        if "tables" in vars(self):
            vars(same)["tables"] = self.tables
        return same

    def take(self, kept: NDArray[np.bool_]) -> RuleSet:
        """Return those rules that are kept [R], with their prices, of the same origin.

        What the cheapest of all rules save is no longer recorded: fewer rules save another share.
        """
        unrecorded = {"price_steps": (), "price_reductions": ()}
        origin = self.origin.model_copy(update=unrecorded)
        if kept.all():
            return self.with_origin(origin)
        borders = np.cumsum(list(self.counts_by_order.values()))[:-1]
        parts = dict(zip(self.orders, np.split(kept, borders), strict=True))
        return replace(
            self,
            origin=origin,
            ids_by_order={n: self.ids_by_order[n][parts[n]] for n in self.orders},
            support_by_order={n: self.support_by_order[n][parts[n]] for n in self.orders},
            prices=None if self.prices is None else self.prices[kept],
        )

    def require_prices(self) -> Prices:
        if self.prices is None:
            rule = "a bound on damage needs the price of every rule"
            found = f"{len(self):,} rules without prices"
            raise RuleSetError(rule, found, "Measure them: umim prune CHECKPOINT TEXTS --keep-all.")
        return self.prices

    def places(self, spans: NDArray[np.integer]) -> Ints:
        """Return the places [M] of rules of one order [M, n] in the set, sorted by n, then ids.

        The spans must be rules of the set; any other one gets the place of some rule, or none's.
        """
        order = spans.shape[1]
        within = np.searchsorted(pack_spans(self.ids_by_order[order]), pack_spans(spans))
        return np.asarray(self.first_place(order) + within, dtype=np.int64)

    def check_tokenizer(self, fingerprint: str, named: str | None = None) -> None:
        """Refuse a tokenizer other than the one the rules were mined with.

        Messages call it ``named``, or by the first digits of its fingerprint.
        """
        mined = self.origin.tokenizer_fingerprint
        rule = f"these rules belong to the tokenizer {str(mined)[:12]}"
        remedy = "Mine rules with this tokenizer, or load the backbone they were mined for."
        fits = mined in (None, fingerprint)
        require(fits, TokenizerMismatchError, rule, named or fingerprint[:12], remedy)

    def check_vocabulary(self, size: int, special: Collection[int]) -> None:
        """Refuse rules with ids that a vocabulary does not have, or with special ones."""
        top = max((int(ids.max()) for ids in self.ids_by_order.values() if len(ids)), default=0)
        rule = f"rule ids must lie in 0..{size - 1}, the tokenizer's vocabulary"
        remedy = "Name the tokenizer that the rules were mined with."
        require(top < size, TokenizerMismatchError, rule, top, remedy)
        marks = np.array(sorted(special), dtype=np.int64)
        for n, ids in self.ids_by_order.items():
            rows = np.isin(ids, marks).any(axis=1)
            if rows.any():
                raise RuleSetError(
                    "rules must hold no special token of the tokenizer",
                    f"{ids[rows][0].tolist()} and {int(rows.sum()) - 1} more of {n} tokens",
                    "Mine them again; special tokens are left out.",
                )

    def check_for_module(self, fingerprint: str, size: int, special: Collection[int]) -> None:
        """Refuse rules that no merge module can be made for: another tokenizer's, or none."""
        self.check_tokenizer(fingerprint)
        self.check_vocabulary(size, special)
        remedy = "Mine them again with a smaller --tau."
        require(len(self) > 0, RuleSetError, "a checkpoint must hold rules", "none", remedy)

    def write(self, directory: Path, compression_level: int | None = None) -> None:
        """Write the rule files into an empty directory, which need not exist."""
        directory.mkdir(exist_ok=True)
        write_table(directory / TABLE, self.ids_by_order, self.support_by_order, compression_level)
        if self.prices is not None:
            save_array(directory / _PRICES, self.prices)
        counts = {str(n): count for n, count in self.counts_by_order.items()}
        body = self.origin.record() | {"rules": counts, "longest": self.longest}
        write_manifest(directory, kind="rules", schema=RULES_SCHEMA, body=body)

    def save(self, directory: str | Path) -> None:
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, directory: str | Path, *, tokenizer_fingerprint: str | None = None) -> RuleSet:
        """Read what :meth:`save` wrote; rules of another tokenizer than the one given are refused.

        Every byte is checked against the manifest's SHA-256 and every row against the format.
        """
        path = Path(directory)
        manifest = read_manifest(path, kind="rules", schema=RULES_SCHEMA, required=(TABLE,))
        ids, support = read_table(path / TABLE)
        rule, remedy = f"{path}/manifest.json must describe its rules", "Mine them again."
        with described(rule, remedy):
            missing = sorted(RuleOrigin().record().keys() - manifest.keys())
            require(not missing, ArtifactError, rule, f"no {', '.join(missing)}", remedy)
            origin = RuleOrigin.of_record(manifest)
        listed = cast("dict[str, object]", manifest["files"])
        prices = np.array(open_array(path / _PRICES)) if _PRICES in listed else None
        longest = manifest.get("longest", max(ids))
        if not isinstance(longest, int) or not max(ids) <= longest <= MAX_LONGEST:
            raise RuleSetError(rule, f"longest {longest}", remedy)
        for n in orders_to(longest):
            ids.setdefault(n, np.zeros((0, n), np.int32))
            support.setdefault(n, np.zeros(0, np.int64))
        rules = cls(ids, support, origin.with_options({"longest": max(ids)}), prices)
        if tokenizer_fingerprint is not None:
            rules.check_tokenizer(tokenizer_fingerprint)
        return rules


def write_table(
    path: Path,
    ids_by_order: dict[int, Ids],
    support_by_order: dict[int, Ints],
    compression_level: int | None = None,
) -> None:
    """Write rules [R_n, n] per order and their counts [R_n] as Parquet.

    ``compression_level`` is of zstd; None for its own.
    """
    orders = np.array(list(ids_by_order), np.int8)
    sizes = [len(ids) for ids in ids_by_order.values()]
    starts = np.concatenate([[0], np.cumsum(np.repeat(orders, sizes), dtype=np.int32)])
    flat = np.concatenate([ids.reshape(-1) for ids in ids_by_order.values()])
    table = pa.table(
        {
            "n": np.repeat(orders, sizes),
            "ids": pa.ListArray.from_arrays(starts.astype(np.int32), pa.array(flat, pa.int32())),
            "count": np.concatenate(list(support_by_order.values())),
        },
        schema=TABLE_SCHEMA,
    )
    try:
        pq.write_table(table, path, compression="zstd", compression_level=compression_level)
    except OSError as error:  # its own text is that of the library
        told = os.strerror(error.errno) if error.errno else str(error)
        raise unwritable(path, table.nbytes, OSError(error.errno, told)) from error


def read_table(path: Path) -> tuple[dict[int, Ids], dict[int, Ints]]:
    """Read what :func:`write_table` wrote; a rule set checks the rows themselves.

    There are all orders up to that of the longest rule, at least 4.
    """
    try:
        with pq.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if not file.schema_arrow.equals(TABLE_SCHEMA) or rows > MAX_RULES:
                raise RuleSetError(
                    f"{path} must have the columns n int8, ids list<int32>, count int64 and at "
                    f"most {MAX_RULES} rows",
                    f"{rows} rows of {file.schema_arrow.to_string()}",
                    "Mine again.",
                )
            _check_size(path, file.metadata)
            table = file.read()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:  # a name that is no UTF-8, too
        raise RuleSetError(f"{path} must be a Parquet file", str(error), "Mine again.") from error
    lists = table["ids"].combine_chunks()
    nulls = sum(column.null_count for column in table.columns) + lists.values.null_count
    require(not nulls, RuleSetError, f"{path} must hold no nulls", nulls, "Mine again.")
    orders, counts = (_numbers(table[name].combine_chunks()) for name in ("n", "count"))
    sizes, flat = np.diff(_numbers(lists.offsets)), _numbers(lists.flatten())
    sized = ((orders >= 2) & (orders <= MAX_LONGEST)).all() and (sizes == orders).all()
    rule = f"{path} must hold rules of 2 to {MAX_LONGEST} ids, sorted by n"
    sorted_by_n = bool(sized and (np.diff(orders) >= 0).all())
    require(sorted_by_n, RuleSetError, rule, "other rows", "Mine again.")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ids, support = {}, {}
    for n in orders_to(int(orders.max(initial=0))):
        low, high = np.searchsorted(orders, [n, n + 1])
        ids[n] = flat[starts[low] : starts[high]].reshape(-1, n)
        support[n] = counts[low:high]
    return ids, support


def _check_size(path: Path, metadata: pq.FileMetaData) -> None:
    """Refuse a file that would take far more memory than it has bytes, before any is taken.

    Rules all differ, so a file of them does not shrink without end: the shipped sets take about 6
    bytes a rule on disk and 25 in memory. Runs of equal values in a forged file do.
    """
    columns = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    ids = sum(column.num_values for column in columns if column.path_in_schema.startswith("ids"))
    pages = sum(column.total_uncompressed_size for column in columns)
    needed = max(metadata.num_rows * _ROW_BYTES + ids * 4, pages)
    limit = max(_FREE_BYTES, _MOST_EXPANSION * path.stat().st_size)
    rule = f"{path} must take at most {limit} bytes of memory"
    found = f"{needed} bytes, {metadata.num_rows} rows with {ids} ids"
    require(needed <= limit, RuleSetError, rule, found, "This is no file of rules; mine again.")


def _numbers(array: pa.Array) -> NDArray[Any]:
    """View signed numbers without nulls; the array's own methods import pandas: half a second."""
    kind = np.dtype(f"i{array.type.bit_width // 8}")
    data = array.buffers()[1]
    if data is None:  # an empty array may have none
        return np.zeros(0, kind)
    return np.frombuffer(data, kind, count=array.offset + len(array))[array.offset :]


def _check_range(low: int, high: int, found: object, remedy: str) -> None:
    rule = f"rule ids must lie in 0..{MAX_TOKEN_ID}"
    require(low >= 0 and high <= MAX_TOKEN_ID, RuleSetError, rule, found, remedy)


def _check_order(n: int, ids: Ids, support: Ints, tau: int) -> None:
    rule = f"rules of order {n} must have {n} ids (int32) and a count (int64) each"
    kinds = ids.dtype == np.int32 and support.dtype == np.int64
    found = f"{ids.dtype} {ids.shape}, {support.dtype} {support.shape}"
    require(kinds and ids.shape == (len(support), n), RuleSetError, rule, found)
    if not len(ids):
        return
    low, high, least = int(ids.min()), int(ids.max()), int(support.min())
    _check_range(low, high, f"{low}..{high}", "Mine again.")
    require(least >= tau, RuleSetError, "every count must reach tau", least, "Mine again.")
    unequal = ids[1:] != ids[:-1]
    first = unequal.argmax(axis=1)
    rows = np.arange(len(ids) - 1)
    rising = unequal.any(axis=1) & (ids[1:][rows, first] > ids[:-1][rows, first])
    if not rising.all():
        odd = ids[1 + int(rising.argmin())].tolist()
        raise RuleSetError("rules must be sorted and all different", odd, "Mine again.")
