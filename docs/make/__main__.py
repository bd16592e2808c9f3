"""Write the documents that are made of results and code.

python -m docs.make                  make every document anew that is out of date
python -m docs.make results readme   only these
python -m docs.make --check          name those out of date, and exit with 1 if there are any
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from os.path import relpath
from typing import Final

from docs.make import readme, recipe_fields, results
from docs.make.document import RESULTS, ROOT, Document
from tasks.report.paper import paper_page

MAKERS: Final[dict[str, Callable[[], list[Document]]]] = {
    "results": results.documents,
    "readme": readme.documents,
    "recipe-fields": recipe_fields.documents,
    "missed-gates": lambda: [Document(RESULTS / "missed-gates.md", results.missed_gates)],
    "paper-tables": lambda: [Document(RESULTS / "paper-tables.md", lambda: paper_page(RESULTS))],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="docs.make", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(MAKERS):  # choices need a name (Python 3.11)
        parser.error(f"unknown documents {sorted(unknown)}; there are {', '.join(MAKERS)}")
    outdated = [
        document
        for name in options.names or MAKERS
        for document in MAKERS[name]()
        if not document.current()
    ]
    for document in outdated:
        if not options.check:
            document.write()
        print(relpath(document.path, ROOT))
    return int(options.check and bool(outdated))


if __name__ == "__main__":
    raise SystemExit(main())
