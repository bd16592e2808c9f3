"""Quality against token reduction: one curve per checkpoint and policy of choosing rules.

    python -m benchmarks.token_reduction --test test.npy --cut valid.npy --damage train.npy
    python -m benchmarks.token_reduction --checkpoints untrained=DIR trained=DIR --policies count

Each policy keeps as many of a checkpoint's rules as give a token reduction on the rows of
``--cut``, to within one rule: those of the least damage (measured on the rows of ``--damage``), of
the highest count, or that save the most tokens by their count. Rules found in another way (by
confidence, say) are one more checkpoint. All checkpoints read the same rows of ``--test``. A text
is ids (.npy files), text as ``umim mine`` takes it, or a split of the docstring corpus; its rows
are evenly spaced over it, and none of them is a row of another text, also in the same file.

``--ages 0 16 64`` adds span eviction, with all rules: nothing is merged, and the KV cache drops
spans that old but for their last columns; its reduction is the cache's.

``--raw-tails 0 16 64`` adds what a shortened prompt costs the text behind it: the first half of
each row is shortened (by the rules of each point, its last tokens raw; or by span eviction), the
second half stays raw and is measured. Their token reduction is that of whole first halves.

Damage tables are kept under ``--cache``. With ``--commit`` the same call goes on behind the points
that were finished, and further checkpoints, policies and reductions join those in ``--out``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from benchmarks.common import Benchmark, Report, go_on, named, save
from benchmarks.corpus import EMBEDDED
from benchmarks.token_reduction.curve_points import Subject, by_place, in_words, new_points
from benchmarks.token_reduction.row_texts import OPTIONS, RowText, read_texts
from benchmarks.token_reduction.rule_policies import (
    DAMAGE,
    POLICIES,
    check_held_out,
    check_tables,
    choose_rules,
    damage_table,
    table_digest,
)
from umim_core import UMIM
from umim_core.config.form import check_raw_tail
from umim_core.errors import RuleSetError
from umim_core.rules.pruning import Cut, check_target

REDUCTIONS: Final = (0.05, 0.10, 0.15, 0.20, 0.30)
_SETTINGS: Final = ("name", "texts", "length", "protect", "batch_size")


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every point of every checkpoint; each is written at once."""
    for target in options.reductions:
        check_target(target)
    for tail in options.raw_tails:
        check_raw_tail(tail, "prompt")
    checkpoints, tables = named(options.checkpoints), named(options.damage_table)
    check_tables(tables, checkpoints)
    tokenizer: str | None = None
    texts: dict[str, RowText] = {}
    for name, where in checkpoints.items():
        umim = UMIM.from_pretrained(where, dtype="float32", local_files_only=True)
        if tokenizer is None:
            tokenizer = umim.backbone.tokenizer_fingerprint
            texts = read_texts(options, umim.backbone.require_tokenizer(), _lengths(options))
            report |= settings(options, texts) | {"subjects": {}}
            go_on(report, options.out, _SETTINGS, ["subjects"])
        elif not umim.backbone.has_tokenizer(tokenizer):
            raise SystemExit(f"{name} has another tokenizer: it cannot read the same rows")
        given = Path(tables[name]) if name in tables else None
        measure_subject(name, umim, texts, given, options, report)


def _lengths(options: argparse.Namespace) -> dict[str, int]:
    """Return the tokens of a row by the uses of text that there are."""
    measured = set(named(options.checkpoints)) - set(named(options.damage_table))
    damage = ("damage",) if DAMAGE in options.policies and measured else ()
    return dict.fromkeys(("test", "cut", *damage), options.length)


def settings(options: argparse.Namespace, texts: Mapping[str, RowText]) -> Report:
    """Return what all points of a result file have in common."""
    return {
        "name": options.out.stem if options.out else "token_reduction",
        "texts": {use: texts[use].facts() for use in ("test", "cut")},
        "length": options.length,
        "protect": options.protect,
        "batch_size": options.batch_size,
    }


def measure_subject(
    name: str,
    umim: UMIM,
    texts: Mapping[str, RowText],
    given: Path | None,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Measure the missing points of one checkpoint."""
    found: Report = {
        "backbone": umim.backbone.name.rpartition("/")[2],
        "backbone_fingerprint": umim.backbone.fingerprint,
        "module_digest": umim.module.digest(),
        "rules_digest": umim.rules.digest,
        "rules": len(umim.rules),
        "unit_positions": umim.compressed.unit_positions,
        "residual": umim.checkpoint.config.residual,
        "rule_rows": 0 if umim.module.rows is None else len(umim.module.rows),
        "steps": umim.checkpoint.config.training.get("steps"),
    }
    earlier = report["subjects"].get(name, {})
    kept = earlier if earlier | found == earlier else {"points": []}
    report["subjects"][name] = kept | found
    mine = report["subjects"][name]
    parts: list[tuple[list[Report], Sequence[int | None]]] = [(mine["points"], [None])]
    parts.append((mine.setdefault("second_halves", []), options.raw_tails))
    table = None
    if DAMAGE in options.policies:
        measured = texts["damage"].rows if given is None else []
        lines = _Lines(f"{name}: damage", sum(map(len, measured)))
        folder = options.cache / "token_reduction"
        table = damage_table(umim, measured, given, folder, options.batch_size, lines.see)
        check_held_out(name, table, texts["test"].rows)
        mine["damage"] = {
            "tokens": table.origin.tokens,
            "rows": table.origin.rows,
            "window": table.origin.window,
            "met": int((table.occurrences > 0).sum()),
            "given": given is not None,
            "own_module": table.origin.module_digest == umim.module.digest(),
            "text_digest": table.origin.text_digest,
        }
    digest = None if table is None else table_digest(table)
    wanted: list[tuple[list[Report], Report]] = []
    for points, tails in parts:
        points[:] = [
            point for point in points if digest is None or point["table"] in (None, digest)
        ]
        asked = options.policies, options.reductions, digest, options.ages, tails
        wanted += [(points, point) for point in new_points(points, *asked)]
    if not wanted:
        return
    subject = Subject(umim, texts["test"].rows, options.batch_size)
    text = texts["cut"].segments()

    @lru_cache(maxsize=1)
    def chosen(policy: str, target: float | None) -> Cut:
        return choose_rules(policy, target, umim, text, options.protect, table)

    for points, point in sorted(wanted, key=lambda pair: by_place(pair[1])):
        began = time.perf_counter()
        try:
            found_rules = chosen(point["policy"], point["target"])
        except RuleSetError as error:
            point["unreached"] = str(error.value)
        else:
            point["cut_token_reduction"] = found_rules.token_reduction
            point |= subject.measure(found_rules.rules, point)
            mine["ppl_base_of_halves" if "raw_tail" in point else "ppl_base"] = subject.base_of(
                point
            ).ppl
        point["seconds"] = time.perf_counter() - began
        points.append(point)
        points.sort(key=by_place)
        save(report, options.out)
        print(f"{name}: {in_words(point)}", file=sys.stderr, flush=True)


class _Lines:
    """Lines of progress on stderr, one per tenth."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._tenth = label, total, 0

    def see(self, tokens: int) -> None:
        tenth = 10 * tokens // self._total
        if tenth > self._tenth:
            self._tenth = tenth
            print(f"{self._label}: {tokens:,} tokens", file=sys.stderr, flush=True)


main = Benchmark(
    name="token_reduction",
    doc=__doc__,
    options={
        "checkpoints": {"nargs": "+", "default": [EMBEDDED], "metavar": "[NAME=]PATH"},
        "policies": POLICIES,
        "reductions": list(REDUCTIONS),
        "raw_tails": {"nargs": "+", "type": int, "default": [], "metavar": "TOKENS"},
        "ages": {"nargs": "+", "type": int, "default": [], "metavar": "TOKENS"},
        "protect": {"nargs": "+", "default": [], "metavar": "PATTERN"},
        **OPTIONS,
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
