"""Weights of a checkpoint's module: ``model.safetensors``, checked before any is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.errors import CheckpointError, ConfigError, require
from umim_core.merging.adapters import SpanAdapters
from umim_core.merging.module import MergeModule
from umim_core.merging.rule_rows import RuleRows
from umim_core.rules.ruleset import RuleSet
from umim_core.store.disk import unwritable

WEIGHTS: Final = "model.safetensors"
_SPANS: Final = "rows.spans"  # tensors of rule rows
_TABLE: Final = "rows.table"
_ADAPTERS: Final = "adapters."
_FLOATS: Final = ("F16", "BF16", "F32", "F64")
_REMEDY: Final = "Train it again."
Shape = tuple[int, ...]


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with refused_tensors(tensors.values(), path):
        save_file(tensors, path)


@contextmanager
def refused_tensors(tensors: Iterable[torch.Tensor], path: Path) -> Iterator[None]:
    """Raise what the disk refuses of these tensors as an error of their file or folder."""
    try:
        yield
    except SafetensorError as error:
        _, refused, reason = str(error).rpartition("I/O error: ")
        if not refused:
            raise
        raise unwritable(path, sum(one.nbytes for one in tensors), OSError(reason)) from error


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
        module = MergeModule(config.hidden_size, config.alone(), config.num_heads, rules.longest)
        if config.adapter_rank:
            module.adapters = _adapters(path, config.adapter_rank)
    expected = shapes_of(module)
    if config.rule_rows:
        expected |= {_SPANS: (config.rule_rows, rules.longest)}
        expected |= {_TABLE: (config.rule_rows, config.hidden_size)}
    weights = read_weights(path, expected)
    if config.rule_rows:
        module.rows = _rows(path.parent, weights, rules)
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _adapters(path: Path, rank: int) -> SpanAdapters:
    """Return empty adapters for the maps and layers in a file, which the backbone decides."""
    pairs: dict[str, dict[str, Shape]] = {"down": {}, "up": {}}
    for name, (shape, _) in _declared(path).items():
        if name.startswith(_ADAPTERS) and len(shape) == 3:
            side, _, key = name.removeprefix(_ADAPTERS).partition(".")
            pairs.get(side, {})[key] = shape
    down, up = pairs["down"], pairs["up"]
    rule = f"{path} must hold adapters of rank {rank}, a pair per linear map"
    require(bool(down) and down.keys() == up.keys(), CheckpointError, rule, pairs, _REMEDY)
    sizes = {key: (shape[1], up[key][2]) for key, shape in down.items()}
    return SpanAdapters(sizes, next(iter(down.values()))[0], rank)


def _declared(path: Path) -> dict[str, tuple[Shape, str]]:
    with _readable(path), safe_open(path, framework="pt") as stream:
        slices = {key: stream.get_slice(key) for key in stream.keys()}  # noqa: SIM118
        return {
            key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()
        }


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
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
        rule = f"{directory} must hold rule rows of spans"
        raise CheckpointError(rule, str(error), _REMEDY) from error
    kept, rule = rows.of_rules(rules), f"{directory} must hold rule rows of its own rules alone"
    found = f"{0 if kept is None else len(kept)} of {len(rows)} are"
    require(kept is rows, CheckpointError, rule, found, _REMEDY)
    return rows


def read_weights(path: Path, expected: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Read exactly the tensors of these names and shapes, checked before any is allocated."""
    limit = 2 * sum(4 * int(np.prod(shape)) for shape in expected.values()) + (1 << 20)
    size = path.stat().st_size
    remedy = "These are other weights; name another directory."
    rule = f"{path} must have at most {limit} bytes"
    require(size <= limit, CheckpointError, rule, f"{size} bytes", remedy)
    declared = _declared(path)
    shapes = {name: shape for name, (shape, _) in declared.items()}
    rule = f"{path} must hold the tensors {sorted(expected)}"
    require(shapes == expected, CheckpointError, rule, shapes, _REMEDY)
    odd = {
        name: kind
        for name, (_, kind) in declared.items()
        if kind not in (("I32",) if name == _SPANS else _FLOATS)
    }
    rule = f"{path} must hold floating-point weights of 16 bits or more, and spans of int32"
    require(not odd, CheckpointError, rule, odd, _REMEDY)
    with _readable(path), safe_open(path, framework="pt") as stream:
        weights = {key: _single(key, stream.get_tensor(key)) for key in expected}
    infinite = [key for key, value in weights.items() if not bool(torch.isfinite(value).all())]
    require(not infinite, CheckpointError, f"{path} must hold finite weights", infinite, _REMEDY)
    return weights
