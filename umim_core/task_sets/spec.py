"""Names of evaluation tasks, as recipes, lm-eval and the comparison know them."""

from __future__ import annotations

from typing import Final

DEFAULT_TASK: Final = "umim_docstrings"
"""The embedded task; its headline is the comparison's ``accuracy``."""
