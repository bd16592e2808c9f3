"""Mine WikiText-2 with every filter policy and measure token reduction on its test split.

python infra/scripts/wikitext_rules.py --data DIR --tokenizer NAME=DIR --tokenizer NAME=DIR
    DIR holds train.txt and test.txt. Writes the results (JSON) and, from them, the page and figure.
python infra/scripts/wikitext_rules.py --check
    exit 1 if the page does not agree with the results
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "wikitext2-rules.json"
FIGURE: Final = "wikitext2-tr-against-rules"
_STEPS: Final = ("raw", "after_overlap", "rules")
Cell = dict[str, Any]


def page(results: dict[str, Any]) -> str:
    """Return the Markdown page of the results."""
    machine, versions = results["machine"], results["versions"]
    taus = [point["tau"] for tokenizer in results["tokenizers"] for point in tokenizer["curve"]]
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts = [
        "# WikiText-2: rules and token reduction by threshold and filter policy",
        "Rules are mined on the training split as one string, in segments of "
        f"{results['segment_length']} tokens. TR is the realised token reduction on the test "
        "split, cut the same way. Counts are given for 2-, 3- and 4-grams: frequent (at least τ), "
        "after the overlap filter, after both filters. *Collisions*: share of rules that have the "
        "surrogate of another rule in a module without positions. *Infix-free*: no rule lies "
        "inside another.",
        f"![Token reduction against number of rules]({FIGURE}.svg)",
        "Every line is one policy (overlap + containment), τ falling from "
        f"{max(taus):,} at its left end to {min(taus)}; the dots are rows of the tables.",
    ]
    for tokenizer in results["tokenizers"]:
        train, test = tokenizer["train"], tokenizer["test"]
        parts += [
            f"## {tokenizer['name']} tokenizer",
            f"{train['tokens']:,} training tokens in {train['segments']:,} segments, "
            f"{test['tokens']:,} test tokens in {test['segments']:,} segments.",
            _table(tokenizer["cells"]),
        ]
    digests = [f"{s}.txt {digest[:12]}" for s, digest in results["corpus"]["sha256"].items()]
    digests += [f"{t['name']} tokenizer.json {t['sha256'][:12]}" for t in results["tokenizers"]]
    parts.append(
        f"Machine: {machine['platform']}, {machine['cores']} cores. {libraries}. "
        f"SHA-256 of the inputs: {', '.join(digests)}. "
        "Source: wikitext2-rules.json, written with this page by "
        "`infra/scripts/wikitext_rules.py`."
    )
    return "\n\n".join(parts) + "\n"


def _table(cells: list[Cell]) -> str:
    head = ["τ", "overlap", "containment", "frequent 2 / 3 / 4", "after overlap 2 / 3 / 4"]
    head += ["rules 2 / 3 / 4", "all rules", "TR", "collisions", "infix-free"]
    rows = [head, ["---:", "---", "---", *["---:"] * 6, "---"]]
    rows += [
        [
            str(cell["tau"]),
            cell["overlap"],
            cell["containment"],
            *(" / ".join(f"{c:,}" for c in cell[s].values()) for s in _STEPS),
            f"{sum(cell['rules'].values()):,}",
            f"{cell['token_reduction']:.2%}",
            f"{cell['collision_rate']:.2%}",
            "yes" if cell["infix_free"] else "no",
        ]
        for cell in cells
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write(out: Path, data: Path, tokenizers: dict[str, Path]) -> None:
    """Measure, then write results, page and figure. --check does without these imports."""
    sys.path.insert(0, str(ROOT))  # the checkout is not installed
    from wikitext_figure import figure_svg
    from wikitext_measure import measure

    from umim_core.store.artifacts import write_json
    from umim_core.store.disk import write_bytes

    write_json(out, measure(data, tokenizers))
    results = json.loads(out.read_text("utf-8"))  # with keys in the order that --check sees
    write_bytes(out.with_suffix(".md"), page(results).encode())
    write_bytes(out.with_name(f"{FIGURE}.svg"), figure_svg(results, FIGURE).encode())


def main() -> int:
    """Measure and write, or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with train.txt and test.txt")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if arguments.check:
        shown = out.with_suffix(".md")
        expected = page(json.loads(out.read_text("utf-8")))
        return int(not shown.is_file() or shown.read_text("utf-8") != expected)
    named = [text.partition("=") for text in arguments.tokenizer]
    if arguments.data is None or not named or not all(path for _, _, path in named):
        parser.error("--data DIR and --tokenizer NAME=DIR are needed")
    _write(out, arguments.data, {name: Path(path) for name, _, path in named})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
