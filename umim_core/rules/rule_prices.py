"""Prices of rules in a rule directory: one number a rule, measured as damage per saved token.

``prices.npy`` lies next to ``rules.parquet``: float32 [R], in the order of the rules. A price is
the estimated divergence (KL, nats) of one occurrence, over the tokens that one saves; see
``pruning.prices``. It belongs to the module that it was measured with. No digest of the rules
depends on it; the directory's manifest covers the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import RuleSetError
from umim_core.store.arrays import open_array, save_array

PRICES_FILE: Final = "prices.npy"
Prices = NDArray[np.float32]


def check_prices(prices: Prices, rules: int) -> None:
    """Refuse what is no price of every rule.

    Raises:
        RuleSetError: If shape or type differ from [R] float32, or a number is not finite.
    """
    right = prices.shape == (rules,) and prices.dtype == np.float32
    if not right or not np.isfinite(prices).all():
        fault = "a number that is not finite" if right else f"{prices.dtype} {prices.shape}"
        raise RuleSetError(
            f"prices of rules must be {rules} finite float32 numbers, one a rule",
            fault,
            "Measure them with umim prune CHECKPOINT TEXTS --keep-all.",
        )


def write_prices(directory: Path, prices: Prices) -> None:
    """Write the prices into a rule directory.

    Raises:
        ArtifactError: If the disk refuses.
    """
    save_array(directory / PRICES_FILE, prices)


def read_prices(directory: Path) -> Prices | None:
    """Read the prices of a rule directory into memory; None where it has none.

    Raises:
        ArtifactError: If the file is torn, no array, or holds Python objects.
    """
    path = directory / PRICES_FILE
    return np.array(open_array(path)) if path.exists() else None
