"""``python -m flows``."""

from __future__ import annotations

from flows.cli import main

if __name__ == "__main__":  # worker processes import this module again
    main()
