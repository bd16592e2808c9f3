"""`python -m tests.seeded_bugs`: seed all bugs, or those whose names hold a word, and report."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from .catalogue import BUGS
from .harness import Harness
from .report import PAGE, counts, load, merged, write


def main() -> None:
    """Seed bugs one after the other; the page is written after each."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_bugs", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose names hold one of these")
    parser.add_argument("--whole", action="store_true", help="ask every test about escapes")
    parser.add_argument("--prefix", default="", help="what a run of tests is started with: 'nice'")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; JSON lies beside it")
    options = parser.parse_args()
    chosen = [
        bug for bug in BUGS if not options.words or any(word in bug.name for word in options.words)
    ]
    findings = load(options.page.with_suffix(".json")) if options.words else []
    with tempfile.TemporaryDirectory(prefix="seeded-bugs-") as folder:
        harness = Harness(Path(folder), shlex.split(options.prefix))
        for bug in chosen:
            finding = harness.seed(bug, whole=options.whole)
            findings = merged(findings, [finding])
            write(findings, options.page)
            print(f"{finding.suite or 'ESCAPED':<8} {bug.name}: {finding.caught_by}", flush=True)
    print(counts(findings))


if __name__ == "__main__":
    main()
