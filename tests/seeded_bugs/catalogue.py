"""All seeded bugs, in the order of the report."""

from __future__ import annotations

from typing import Final

from .bug import SeededBug
from .method import METHOD
from .resume import RESUME
from .wiring import WIRING

BUGS: Final[tuple[SeededBug, ...]] = (*METHOD, *RESUME, *WIRING)
