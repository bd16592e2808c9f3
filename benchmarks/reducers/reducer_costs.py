"""Seconds and operations of token reducers and of UMIM on one text, next to the base's prefill.

base       T tokens are read                                          1
a reducer  its choice, then K tokens are read     compressing + left  = total, times base
UMIM       matching and merging, then its units are read              likewise, at its own K
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import Report
from benchmarks.engine_sides import Ids
from benchmarks.timing import alternate, finished, spread
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.forward_cost import causal_pairs, forward_flops
from umim_core.baselines.methods import BASELINES, ReducedTokens, Text, TokenReducer
from umim_core.baselines.reduction import TargetReduction, reduce_tokens
from umim_core.errors import BackboneError, ConfigError
from umim_core.merging.compressed import Compressed

BASE: Final = "base"
LEFT: Final = "left"
UMIM: Final = "umim"
_UMIM_LEFT: Final = "umim, left"
Seconds = Mapping[str, Sequence[float]]


def make_reducers(
    names: Sequence[str], given: Compressed
) -> tuple[dict[str, TokenReducer], dict[str, str]]:
    """Make token reducers by name.

    Args:
        names: Of registered baselines.
        given: Whose backbone scores.

    Returns:
        Those that could be made, and why others could not: their model is not at hand.

    Raises:
        ConfigError: If a name is unknown, or no token reducer.
    """
    made: dict[str, TokenReducer] = {}
    missing = {}
    for name in names:
        try:
            method = BASELINES.find(name)(given.backbone, given.require_matcher())
        except BackboneError as error:
            missing[name] = str(error)
            continue
        if not isinstance(method, ReducedTokens):
            raise ConfigError("a method must be a token reducer", name, "See `umim baselines`.")
        made[name] = method.reducer
    return made, missing


@torch.no_grad()
def prefill(backbone: Backbone, embeddings: Tensor, positions: Tensor | None = None) -> Tensor:
    """Read embeddings [1, S, d] and return the logits [V] behind the last unit."""
    return backbone.head(backbone.hidden(embeddings, None, positions)[0, -1])


@torch.no_grad()
def merged(given: Compressed, ids: Ids) -> tuple[Tensor, Tensor]:
    """Match and merge a prompt [T]: embeddings of its units [1, S, d], and positions [1, S]."""
    packed = given.pack_prompts([ids])
    return given.embed(packed), packed.position_ids(given.unit_positions)


def merge_flops(given: Compressed, ids: Ids) -> int:
    """Count the floating-point operations of the matrix products that merge a prompt [T].

    Every different span is merged once, padded to the longest.
    """
    with FlopCounterMode(display=False) as counter:
        merged(given, ids)
    return int(counter.get_total_flops())


def measure(
    given: Compressed,
    reducers: Mapping[str, TokenReducer],
    ids: Ids,
    target: float,
    rounds: int,
) -> Report:
    """Time the base's prefill, every reducer, and what is left to read, in turn.

    What is left takes the same time after every reducer, whose K tokens are as many: the first
    tokens of the text stand for them.

    Args:
        given: The model with its rules.
        reducers: By name.
        ids: Text [T].
        target: Token reduction of the reducers.
        rounds: Alternating rounds.

    Returns:
        Seconds of the base and of what is left, and a row per method.
    """
    backbone = given.backbone
    text = Text(ids, np.zeros(len(ids), dtype=bool), ids[:0])
    budget = TargetReduction(target).stays(len(ids))
    rows = torch.from_numpy(ids).to(backbone.device)[None]
    units, positions = merged(given, ids)
    kept: dict[str, list[Any]] = {name: [] for name in (*reducers, UMIM)}
    choices = {
        name: partial(reduce_tokens, reducer, text, budget) for name, reducer in reducers.items()
    }

    def choose(name: str) -> None:
        kept[name].append(choices[name]())

    def merge() -> None:
        kept[UMIM].append(merged(given, ids)[0])

    sides: dict[str, Callable[[], object]] = {
        BASE: lambda: prefill(backbone, backbone.embed(rows)),
        LEFT: lambda: prefill(backbone, backbone.embed(rows[:, :budget])),
        UMIM: merge,
        _UMIM_LEFT: lambda: prefill(backbone, units, positions),
    } | {name: partial(choose, name) for name in reducers}
    done = {name: finished(side, backbone.device) for name, side in sides.items()}
    seconds = alternate(done, rounds)
    found = {
        name: times_of(seconds, name, LEFT)
        | {
            "kept": len(kept[name][0].kept),
            "token_reduction": kept[name][0].token_reduction,
            "equal": all(np.array_equal(one.kept, kept[name][0].kept) for one in kept[name]),
            "flops": kept[name][0].flops,
        }
        for name in reducers
    }
    found[UMIM] = times_of(seconds, UMIM, _UMIM_LEFT) | {
        "kept": units.shape[1],
        "token_reduction": 1 - units.shape[1] / len(ids),
        "equal": all(torch.equal(one, units) for one in kept[UMIM]),
        "flops": merge_flops(given, ids),
    }
    whole = read_flops(backbone, len(ids))
    for row in found.values():
        left = read_flops(backbone, row["kept"])
        row["flops_left"] = left / whole
        row["flops_share"] = row["flops"] / whole
        row["flops_total"] = (row["flops"] + left) / whole
    return {"tokens": len(ids), BASE: {"seconds": spread(seconds[BASE])}, "methods": found}


def times_of(seconds: Seconds, name: str, left: str) -> Report:
    """Return the seconds of compressing, and shares of the base's prefill, by rounds.

    Args:
        seconds: Of every side, one per round.
        name: The side that compresses.
        left: The side that reads what is left.
    """
    pairs = list(zip(seconds[name], seconds[left], seconds[BASE], strict=False))
    return {
        "seconds": spread(seconds[name]),
        "share": spread([own / base for own, _, base in pairs]),
        "left": spread([rest / base for _, rest, base in pairs]),
        "total": spread([(own + rest) / base for own, rest, base in pairs]),
    }


def read_flops(backbone: Backbone, tokens: int) -> int:
    """Estimate the floating-point operations of a prefill of so many tokens."""
    return forward_flops(backbone.model, tokens, causal_pairs(tokens), 1)
