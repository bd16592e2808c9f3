"""``python -m flows``."""

from __future__ import annotations

from flows.cli import main

main()
