"""Draw the coloured example of README.md: a text as the embedded checkpoint cuts it.

python infra/scripts/readme_example.py            write docs/results/compress.svg
python infra/scripts/readme_example.py --check    exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from umim_core import UMIM  # noqa: E402  (the checkout is not installed)

CHECKPOINT = "umim-docs-llama"
PICTURE = ROOT / "docs" / "results" / "compress.svg"
TEXT = (
    "Return a new array with the same shape and type as a given array. The default value of this "
    "parameter is None, in which case the shape of the input is used. See the documentation of the "
    "base class for more information on how to use this method."
)


def rendered() -> str:
    """Return the picture."""
    return UMIM.from_pretrained(CHECKPOINT).compress(TEXT).view.svg("umim compress") + "\n"


def main() -> int:
    """Write or check the picture."""
    picture = rendered()
    if "--check" in sys.argv[1:]:
        current = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == picture
        return int(not current)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
