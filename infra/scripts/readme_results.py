"""Write the results table of README.md from a committed result file.

python infra/scripts/readme_results.py            rewrite README.md
python infra/scripts/readme_results.py --check    exit 1 if README.md is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.report.comparison_table import comparison_markdown  # noqa: E402  (the checkout is not installed)
from tasks.report.report_data import ReportData  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "embedded.json"
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- results:embedded -->\n).*?(<!-- /results:embedded -->)", re.DOTALL)


def rendered(readme: str) -> str:
    """Return the README with the table of the result file."""
    data = ReportData.model_validate_json(RESULTS.read_text(encoding="utf-8"))
    table = comparison_markdown(data.rows).strip()
    host = ", ".join(f"{name} {value}" for name, value in data.host.items())
    block = f"{table}\n\nMachine: {host}. Source: docs/results/embedded.json.\n"
    return BLOCK.sub(lambda match: match[1] + block + match[2], readme)


def main() -> int:
    """Rewrite or check the README."""
    before = README.read_text(encoding="utf-8")
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
