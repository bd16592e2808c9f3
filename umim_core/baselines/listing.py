"""List of the registered baselines: name, side and one line each."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import getdoc
from typing import get_type_hints

from umim_core.baselines.methods import BASELINES, Side


@dataclass(frozen=True)
class ListedBaseline:
    """A registered baseline.

    Attributes:
        name: As recipes and lm-eval find it.
        side: ``prompt`` saves prefill and KV cache, ``cache`` saves KV cache alone.
        line: What it does, the first line of its function's docstring.
    """

    name: str
    side: Side
    line: str


def listed_baselines() -> list[ListedBaseline]:
    """Return all baselines, those of the prompt first, each side by name; loads no model."""
    found = []
    for name in BASELINES.names():
        make = BASELINES.find(name)
        line = (getdoc(make) or "").partition("\n")[0]
        found.append(ListedBaseline(name, get_type_hints(make)["return"].side, line))
    return sorted(found, key=lambda one: (one.side != "prompt", one.name))
