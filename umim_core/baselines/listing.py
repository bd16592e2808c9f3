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


def side_of(name: str) -> Side:
    """Return the side of a baseline; loads no model.

    Raises:
        ConfigError: If there is none of that name.
    """
    side: Side = get_type_hints(BASELINES.find(name))["return"].side
    return side


def listed_baselines() -> list[ListedBaseline]:
    """Return all baselines, those of the prompt first, each side by name; loads no model."""
    listed = []
    for name in BASELINES.names():
        line = (getdoc(BASELINES.find(name)) or "").partition("\n")[0]
        listed.append(ListedBaseline(name, side_of(name), line))
    return sorted(listed, key=lambda one: (one.side != "prompt", one.name))
