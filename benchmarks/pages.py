"""The pages (Markdown) of the benchmarks and ablations, each made of its result file alone.

An ablation is any result file that says so (``"kind": "ablation"``, as ``umim-ablate`` writes it);
its figures are drawn with its page.

python -m benchmarks.pages            write the pages anew
python -m benchmarks.pages --check    exit 1 if a page does not agree with its results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import ablations
from benchmarks.common import ROOT, Report
from benchmarks.distill_page import distill_page
from benchmarks.engine_page import engine_page
from benchmarks.generation_pages import capacity_page, quality_page
from benchmarks.perplexity_page import perplexity_page
from benchmarks.tables import gate_table, machine, spread, table

RESULTS: Final = ROOT / "docs" / "results"
SCALING_FIGURE: Final = "mining-scaling.svg"
_MIB: Final = 2.0**20


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


def ddp_vs_zero2_page(report: Report) -> str:
    """Return the page of ``benchmarks/ddp_vs_zero2.py``."""
    rows = [
        [
            name,
            spread(side["seconds_per_step"], " s", 3),
            spread(side["times_one_process"]),
            *(f"{side[k] / _MIB:,.2f}" for k in ("moment_bytes", "optimizer_bytes", "state_bytes")),
            f"{side['peak_bytes'] / _MIB:,.0f}",
            f"{side['loss_difference']:.1e}",
            f"{side['gradient_difference']:.1e}",
        ]
        for name, side in report["sides"].items()
    ]
    head = ["side", "time per step (quartiles)", "against one process", "moments, MiB"]
    head += ["optimiser, MiB", "resume state, MiB", "peak, MiB", "loss", "gradient"]
    corpus, tolerances = report["corpus"], report["tolerances"]
    parts = [
        "# Training: DDP and ZeRO-2 against one process",
        f"{report['backbone']}, {report['steps']} steps over global batches of "
        f"{report['batch_size']} rows of {corpus['segment_length']} tokens, {corpus['rules']:,} "
        "rules, float32, one core per rank; started by Ray Train but for the one process. Moments, "
        "optimiser state and peak memory are those of one rank; a resume state is that of all. "
        "The optimiser state of ZeRO-2 includes its master copy of the weights.",
        table(head, rows),
        "*loss*: largest relative difference of a loss on the whole curve from the joint batch in "
        f"one process (tolerance {tolerances['loss']:.0e}); *gradient*: of a component of the "
        f"first gradient, in units of the largest (tolerance {tolerances['gradient']:.0e}).",
    ]
    return "\n\n".join([*parts, gate_table(report), machine(report)]) + "\n"


PAGES: Final[dict[str, Callable[[Report], str]]] = {
    "mining": mining_page,
    "matching": matching_page,
    "mining_scaling": scaling_page,
    "ddp_vs_zero2": ddp_vs_zero2_page,
    "distill_step": distill_page,
    "engine": engine_page,
    "perplexity": perplexity_page,
    "generation_quality": quality_page,
    "cache_capacity": capacity_page,
}


def outdated(folder: Path) -> list[str]:
    """Return the results of a folder whose page or figure is missing or shows something else."""
    found = []
    for results in sorted(folder.glob("*.json")):
        text = results.read_text(encoding="utf-8")
        if results.stem in PAGES:
            page, figures = PAGES[results.stem](json.loads(text)), []
        elif is_ablation(text):
            page, figures = ablations.page(text), ablations.figures(results)
        else:
            continue
        shown = results.with_suffix(".md")
        current = shown.is_file() and shown.read_text(encoding="utf-8") == page
        if not current or not all(ablations.shows(figure, text) for figure in figures):
            found.append(results.stem)
    return found


def is_ablation(text: str) -> bool:
    """Return whether a result file says that it is an ablation."""
    found = json.loads(text)
    return isinstance(found, dict) and found.get("kind") == "ablation"


def write(results: Path) -> None:
    """Write the page of a result file anew, and the figures of an ablation."""
    text = results.read_text(encoding="utf-8")
    if results.stem in PAGES:
        page = PAGES[results.stem](json.loads(text))
    else:
        page = ablations.page(text)
        ablations.draw(results)
    results.with_suffix(".md").write_text(page, encoding="utf-8")


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
        write(options.folder / f"{name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
