"""Weights of a checkpoint's module: ``model.safetensors``, checked before any is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.errors import CheckpointError, ConfigError
from umim_core.merging.adapters import SpanAdapters
from umim_core.merging.forms.rule_rows import RuleRows
from umim_core.merging.module import MergeModule
from umim_core.rules.grams import LONGEST
from umim_core.rules.ruleset import RuleSet
from umim_core.store.disk import unwritable

WEIGHTS: Final = "model.safetensors"
_SPANS: Final = "rows.spans"  # tensors of rule rows
_TABLE: Final = "rows.table"
_ADAPTERS: Final = "adapters."
_DOWN: Final = "adapters.down."
_UP: Final = "adapters.up."
_FLOATS: Final = ("F16", "BF16", "F32", "F64")
_WIDEST: Final = 1 << 20  # inputs or outputs of a linear map


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors as safetensors."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        _, refused, reason = str(error).rpartition("I/O error: ")
        if not refused:
            raise
        size = sum(value.nbytes for value in tensors.values())
        raise unwritable(path, size, OSError(reason)) from error


def write_module(module: nn.Module, path: Path) -> None:
    """Write a module's weights in single precision; with adapters, all of them in bfloat16."""
    state = module.state_dict()
    # With adapters single precision would take 15 MB, not 8.
    half = any(name.startswith(_ADAPTERS) for name in state)
    weights = {}
    for name, value in state.items():
        stored = value.bfloat16() if half and name != _SPANS else _single(name, value)
        weights[name] = stored.detach().cpu().contiguous()
    save_tensors(weights, path)
    path.chmod(0o644)  # save_file leaves it to the owner alone


def read_module(path: Path, config: CheckpointConfig, rules: RuleSet) -> MergeModule:
    """Return the module that ``write_module`` wrote, its weights fixed."""
    with torch.device("meta"):  # a declared size allocates nothing and draws no weights
        module = MergeModule.of(config, config.hidden_size, config.num_heads)
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    if config.rule_rows:
        expected |= {_SPANS: (config.rule_rows, LONGEST)}
        expected |= {_TABLE: (config.rule_rows, config.hidden_size)}
    if config.adapter_rank:
        expected |= _adapter_shapes(path, config.adapter_rank)
    weights = read_weights(path, expected)
    if config.rule_rows:
        module.rows = _rows(path.parent, weights, rules)
    if config.adapter_rank:
        module.adapters = _adapters(weights)
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)


def _adapter_shapes(path: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters in a file, which the backbone's layers decide."""
    adapters = {
        name: shape for name, (shape, _) in _declared(path).items() if name.startswith(_ADAPTERS)
    }
    down = {n.removeprefix(_DOWN): shape for n, shape in adapters.items() if n.startswith(_DOWN)}
    up = {n.removeprefix(_UP): shape for n, shape in adapters.items() if n.startswith(_UP)}
    layers = {shape[0] for shape in adapters.values() if len(shape) == 3}
    paired = down.keys() == up.keys() and len(down) + len(up) == len(adapters)
    formed = all(len(shape) == 3 and 0 < max(shape) <= _WIDEST for shape in adapters.values())
    ranked = formed and {s[2] for s in down.values()} | {s[1] for s in up.values()} == {rank}
    if not (paired and ranked and len(layers) == 1):
        raise CheckpointError(
            f"{path} must hold adapters of rank {rank}, a pair per linear map",
            adapters,
            "Train it again.",
        )
    return adapters


def _adapters(weights: Mapping[str, torch.Tensor]) -> SpanAdapters:
    """Return empty adapters of the sizes of a checkpoint's weights."""
    sizes = {
        name.removeprefix(_DOWN): (value.shape[1], weights[_UP + name.removeprefix(_DOWN)].shape[2])
        for name, value in weights.items()
        if name.startswith(_DOWN)
    }
    first = next(value for name, value in weights.items() if name.startswith(_DOWN))
    with torch.device("meta"):
        return SpanAdapters(sizes, first.shape[0], first.shape[2])


def _declared(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes and types that a file declares."""
    try:
        with safe_open(path, framework="pt") as stream:
            slices = {key: stream.get_slice(key) for key in stream.keys()}  # noqa: SIM118
            return {
                key: (tuple(part.get_shape()), str(part.get_dtype()))
                for key, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} must be safetensors", str(error), "Train again.") from error


def _single(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in single precision, unless it holds the ids of spans."""
    return value if name == _SPANS else value.float()


def _rows(directory: Path, weights: dict[str, torch.Tensor], rules: RuleSet) -> RuleRows:
    """Return the rule rows that a checkpoint's weights hold, each of one of its rules."""
    try:
        rows = RuleRows.of(weights[_SPANS], weights[_TABLE])
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} must hold rule rows of spans", str(error), "Train it again."
        ) from error
    if (kept := rows.of_rules(rules)) is not rows:
        raise CheckpointError(
            f"{directory} must hold rule rows of its own rules alone",
            f"{0 if kept is None else len(kept)} of {len(rows)} are",
            "Train it again.",
        )
    return rows


def read_weights(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read exactly the tensors wanted by name and shape, checked before any is allocated."""
    limit = 2 * sum(4 * int(np.prod(shape)) for shape in expected.values()) + (1 << 20)
    if path.stat().st_size > limit:
        raise CheckpointError(
            f"{path} must have at most {limit} bytes",
            f"{path.stat().st_size} bytes",
            "These are other weights; name another directory.",
        )
    declared = _declared(path)
    if (shapes := {name: shape for name, (shape, _) in declared.items()}) != expected:
        raise CheckpointError(
            f"{path} must hold the tensors {sorted(expected)}", shapes, "Train it again."
        )
    types = {name: kind for name, (_, kind) in declared.items()}
    odd_types = {
        name: kind
        for name, kind in types.items()
        if kind not in (("I32",) if name == _SPANS else _FLOATS)
    }
    if odd_types:
        raise CheckpointError(
            f"{path} must hold floating-point weights of 16 bits or more, and spans of int32",
            odd_types,
            "Train it again.",
        )
    try:
        with safe_open(path, framework="pt") as stream:
            weights = {key: _single(key, stream.get_tensor(key)) for key in expected}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} must be safetensors", str(error), "Train again.") from error
    if odd := [key for key, value in weights.items() if not bool(torch.isfinite(value).all())]:
        raise CheckpointError(f"{path} must hold finite weights", odd, "Train it again.")
    return weights
