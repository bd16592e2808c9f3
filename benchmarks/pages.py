"""The pages (Markdown) of the benchmarks, each made of its result file alone.

python -m benchmarks.pages            write the pages anew
python -m benchmarks.pages --check    exit 1 if a page does not agree with its results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from benchmarks.common import ROOT, Report

RESULTS: Final = ROOT / "docs" / "results"
SCALING_FIGURE: Final = "mining-scaling.svg"
_MIB: Final = 2.0**20


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, its columns aligned for the terminal; the first one is text."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def text(line: list[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def spread(values: dict[str, float], unit: str = "", digits: int = 2) -> str:
    """Return a median with its quartiles."""
    low, high = values["low"], values["high"]
    return f"{values['median']:.{digits}f}{unit} ({low:.{digits}f}-{high:.{digits}f})"


def gate_table(report: Report) -> str:
    """Return the gates and whether all results were equal."""
    rows = [
        [name.replace("_", " "), f"{value:,}", f"{limit:,}", "met" if passed else "missed"]
        for name, (value, limit, passed) in report["gates"].items()
    ]
    equal = "yes" if report["equal"] else "NO"
    return table(["gate", "value", "limit", ""], rows) + f"\n\nEqual results: {equal}."


def machine(report: Report) -> str:
    """Return where and with what was measured."""
    found = report["facts"]
    libraries = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    commit = f" Commit {found['commit'][:12]}." if found["commit"] else ""
    return f"Machine: {found['platform']}, {found['cores']} cores. {libraries}.{commit}"


def mining_page(report: Report) -> str:
    """Return the page of ``benchmarks/mining.py``."""
    corpus, rules = report["corpus"], report["rules"]
    ratios = report["ratios"]
    rows = [
        [
            name,
            side["cores"],
            f"{side['tokens']:,}",
            spread(side["seconds"], " s"),
            side["seconds"]["runs"],
            f"{side['tokens_per_s'] / 1e6:.2f}",
            f"{spread(ratios[name])} x {ratios[name]['against']}" if name in ratios else "",
        ]
        for name, side in report["sides"].items()
    ]
    head = ["side", "cores", "tokens", "time (quartiles)", "runs", "Mtokens/s", "time against"]
    memory = report["memory"]
    parts = [
        "# Mining: ours and peers",
        f"{corpus['tokens']:,} tokens in segments of {corpus['segment_length']}; all grams that "
        f"occur at least {report['tau']} times: {' / '.join(f'{n:,}' for n in rules.values())} of "
        "2 / 3 / 4 tokens. Every side returns them with their counts; the results are compared in "
        "the run. Ratios are medians over pairs of the same round, with quartiles.",
        table(head, rows),
        f"Memory of a process that only counts: {memory['peak_bytes'] / _MIB:,.0f} MiB at its "
        f"peak, {memory['predicted_bytes'] / _MIB:,.0f} MiB predicted by another process.",
    ]
    ray = report["ray"]
    if ray is not None:
        parts.append(
            f"Ray Data on {ray['tokens']:,} tokens, two cores each: "
            f"{spread(ray['share'])} of the speed of the bare kernel "
            f"({ray['share']['runs']} pairs; start of the cluster and first counts left out)."
        )
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


def matching_page(report: Report) -> str:
    """Return the page of ``benchmarks/matching.py``."""
    rows = [
        [
            f"{name}: {side}",
            f"{sum(found['rules'].values()):,}",
            spread(values["seconds"], " s", 3),
            f"{values['tokens_per_s'] / 1e6:.2f}",
            spread(values["ratio"]) if "ratio" in values else "",
        ]
        for name, found in report["rule_sets"].items()
        for side, values in found["sides"].items()
    ]
    head = ["rules: side", "rules", "time (quartiles)", "Mtokens/s", "time against ours"]
    sizes = [
        [
            name,
            f"{found['bytes_per_rule']['memory']:.1f}",
            f"{found['bytes_per_rule']['disk']:.1f}",
            f"{found['bytes_per_rule']['directory']:.1f}",
        ]
        for name, found in [*report["rule_sets"].items(), ("synthetic", report["synthetic"])]
    ]
    synthetic = report["synthetic"]
    orders = " / ".join(f"{count:,}" for count in synthetic["rules"].values())
    parts = [
        "# Matching: ours and peers",
        f"{report['held_out_tokens']:,} tokens that the rules were not mined on, in segments of "
        f"{report['segment_length']}, one thread each. Every matcher returns the same spans; they "
        "are compared in the run. The tokenizer's time is for the text of the same tokens.",
        table(head, rows),
        table(["bytes per rule", "in memory", "tables on disk", "whole directory"], sizes),
        f"Loading {orders} synthetic rules of 2 / 3 / 4 tokens and matching a first segment: "
        f"{spread(synthetic['load_seconds'], ' s', 3)}, files in the page cache.",
    ]
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


def scaling_page(report: Report) -> str:
    """Return the page of ``benchmarks/mining_scaling.py``."""
    rows = [
        [
            f"{int(size):,}",
            f"{sum(found['distinct'].values()):,}",
            f"{sum(found['rules'].values()):,}",
            spread(found["nanoseconds_1"], "", 0),
            spread(found["nanoseconds_2"], "", 0),
            f"{found['threads'] and found['threads']['median']:.2f}",
            f"{found['peak_bytes'] / _MIB:,.0f}",
        ]
        for size, found in report["measured"].items()
    ]
    head = ["tokens", "distinct", "rules", "ns/token, 1 thread", "2 threads", "2 against 1", "MiB"]
    laws = ("decade", "dry_run")
    errors = [
        [f"{int(size):,} {law.replace('_', '-')}", f"{stated[law]['sample_tokens']:,}"]
        + [
            f"{stated[law]['error'][kind]:+.1%}" if "error" in stated[law] else "not measured"
            for kind in ("memory", "seconds", "distinct", "rules")
        ]
        for size, stated in report["predictions"].items()
        for law in laws
        if law in stated
    ]
    parts = [
        "# Mining: cost against tokens",
        f"![Time and memory against tokens]({SCALING_FIGURE})",
        f"First tokens of one corpus, segments of {report['segment_length']}, tau {report['tau']}. "
        "Rules are all frequent grams; distinct are the candidates that were counted. Memory is "
        "the peak of a process that only counts.",
        table(head, rows),
        "Errors of the predictions, each written down before its measurement was run. *decade*: "
        "the law fitted on a sample of the next smaller power of ten of tokens; *dry-run*: on the "
        "sample that `umim mine --dry-run` takes.",
        table(["prediction for", "sample", "memory", "time", "distinct", "rules"], errors),
    ]
    if report["repeat"] is not None:
        repeat = report["repeat"]
        parts.append(
            f"A corpus of {repeat['base_tokens']:,} tokens repeated {repeat['times']} times on "
            f"segment borders ({repeat['tokens']:,} tokens): rules at tau {repeat['tau']} "
            f"{'equal' if repeat['equal'] else 'DIFFER FROM'} those of the corpus at tau "
            f"{report['tau']}, counts {repeat['times']} times as high; peak memory "
            f"{repeat['peak_bytes'] / _MIB:,.0f} MiB, {repeat['predicted_bytes'] / _MIB:,.0f} MiB "
            "predicted."
        )
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


PAGES: Final[dict[str, Callable[[Report], str]]] = {
    "mining": mining_page,
    "matching": matching_page,
    "mining_scaling": scaling_page,
}


def outdated(folder: Path) -> list[str]:
    """Return the results of a folder whose page is missing or shows something else."""
    found = []
    for name, page in PAGES.items():
        results, shown = folder / f"{name}.json", folder / f"{name}.md"
        if results.is_file():
            expected = page(json.loads(results.read_text(encoding="utf-8")))
            if not shown.is_file() or shown.read_text(encoding="utf-8") != expected:
                found.append(name)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = outdated(options.folder)
    if options.check:
        return int(bool(names))
    for name in names:
        report = json.loads((options.folder / f"{name}.json").read_text(encoding="utf-8"))
        (options.folder / f"{name}.md").write_text(PAGES[name](report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
