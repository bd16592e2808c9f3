"""Checkpoints of the paper's authors: their release becomes a checkpoint of the paper's form.

A release (github.com/Zesearch/Umim-LLM, ``artifacts/MODEL``) is a folder::

    runtime_config.json     names of the other files, number of heads; may be absent
    merge_module.pt         nine tensors, 2 d^2 + 7 d numbers
    filtered_bigrams_tensor.pt, filtered_trigrams_tensor.pt, filtered_fourgrams_tensor.pt
                            rules [R, n]

Its matcher takes the longest rule first, left to right, as ours; its rules are infix-free, so what
merges while decoding is equal, too.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.module_weights import shapes_of
from umim_core.errors import CheckpointError, RuleSetError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.grams import ORDERS
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import described, read_json, safe_join
from umim_core.text.token_ids import MAX_TOKEN_ID

_RULES: Final = {
    n: f"filtered_{name}s_tensor.pt"
    for n, name in zip(ORDERS, ("bigram", "trigram", "fourgram"), strict=True)
}
_MOST_RULES: Final = 1 << 23  # of an order
_SPARE: Final = 1 << 20  # bytes of a file that are no numbers
# Their names of our tensors, behind what a training wrapper may put in front.
_TENSORS: Final = {
    "query": "query",
    "token_processor.0.weight": "linear_kv.weight",
    "token_processor.0.bias": "linear_kv.bias",
    "token_processor.2.weight": "norm_kv.weight",
    "token_processor.2.bias": "norm_kv.bias",
    "output_proj.0.weight": "linear_o.weight",
    "output_proj.0.bias": "linear_o.bias",
    "output_proj.2.weight": "norm_o.weight",
    "output_proj.2.bias": "norm_o.bias",
}
_PREFIX: Final = "attention_pool."
_UNREADABLE: Final = (
    zipfile.BadZipFile, UnpicklingError, RuntimeError, ValueError, EOFError, OSError,
)  # fmt: skip


class _Config(BaseModel):
    """Content of ``runtime_config.json``; what it leaves out has the usual names."""

    merge_weights: str = "merge_module.pt"
    rules_dir: str = ""
    rule_files: Annotated[dict[Literal["2", "3", "4"], str], Field(min_length=3)] = {}
    num_heads: Annotated[int, Field(ge=1, strict=True)] = 4


def read_release(folder: Path, backbone: Backbone) -> tuple[Checkpoint, int]:
    """Read a release of the paper's authors for its backbone; sizes are checked before reading.

    Returns:
        The paper's form, bound to its backbone, and how many rules hold a special token of the
        tokenizer: they never merge here.
    """
    config = _config(folder)
    module = _module(safe_join(folder, config.merge_weights), backbone, config.num_heads)
    files = {n: str(Path(config.rules_dir, name)) for n, name in _RULES.items()}
    files |= {int(n): name for n, name in config.rule_files.items()}
    spans: list[tuple[int, ...]] = []
    special = 0
    for n, name in files.items():
        rows = _rules(safe_join(folder, name), n, backbone)
        plain = ~np.isin(rows, sorted(backbone.special_ids)).any(axis=1)
        special += int((~plain).sum())
        spans += map(tuple, rows[plain].tolist())
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint)
    merged_model = MergedModel(backbone, module.to(backbone.device), Matcher(rules))
    return Checkpoint.of(merged_model, {"source": "release of the paper's authors"}), special


def _config(folder: Path) -> _Config:
    rule, remedy = "a release must be a folder", "Name the folder of merge_module.pt."
    require(folder.is_dir(), CheckpointError, rule, str(folder), remedy)
    path = folder / "runtime_config.json"
    rule = f"{path} must name merge_weights, rule_files of 2, 3 and 4 tokens, and num_heads"
    with described(rule, "Take the file of the release.", CheckpointError):
        return _Config.model_validate(read_json(path) if path.exists() else {})


def _module(path: Path, backbone: Backbone, heads: int) -> MergeModule:
    module = MergeModule(backbone.hidden_size, num_heads=heads)
    found = _read(path, 4 * sum(value.numel() for value in module.parameters()))
    for key in ("model_state_dict", "module"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    weights: dict[str, torch.Tensor] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        bare = str(name).removeprefix("module.").removeprefix("merge_module.").removeprefix(_PREFIX)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            weights[_TENSORS.get(bare, str(name))] = value.float()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    size, remedy = backbone.hidden_size, "Name the backbone that it was trained for."
    rule = f"{path} must hold the nine tensors of a merge module for size {size} and {heads} heads"
    require(shapes == shapes_of(module), CheckpointError, rule, shapes, remedy)
    odd = [name for name, value in weights.items() if not bool(torch.isfinite(value).all())]
    require(not odd, CheckpointError, f"{path} must hold finite weights", odd)
    module.load_state_dict(weights)
    return module.eval().requires_grad_(False)


def _rules(path: Path, n: int, backbone: Backbone) -> NDArray[np.int64]:
    """Return the rules [R, n] of a file, rows ascending, each once."""
    found = _read(path, 8 * n * _MOST_RULES)
    rule = f"{path} must hold a tensor of token ids [rules, {n}]"
    if not (isinstance(found, torch.Tensor) and found.dtype in (torch.int32, torch.int64)):
        raise RuleSetError(rule, getattr(found, "dtype", type(found).__name__))
    require(found.ndim == 2 and found.shape[1] == n, RuleSetError, rule, tuple(found.shape))
    rows = np.unique(found.numpy().astype(np.int64), axis=0)
    most = min(backbone.vocab_size - 1, MAX_TOKEN_ID)
    least, highest = int(rows.min(initial=0)), int(rows.max(initial=0))
    rule = f"ids in {path} must lie in 0..{most}, the vocabulary of {backbone.name}"
    remedy = "Name the backbone whose tokenizer made them."
    require(least >= 0 and highest <= most, RuleSetError, rule, [least, highest], remedy)
    return rows


def _read(path: Path, most: int) -> object:
    """Read tensors that ``torch.save`` wrote, of at most so many bytes; nothing in them runs."""
    rule = f"{path} must be a file that torch.save wrote, of at most {most + _SPARE} bytes"
    remedy = "Download the release again; files of Git LFS need git lfs pull."
    require(path.is_file(), CheckpointError, f"{path} must be a file", "none", remedy)
    size = path.stat().st_size
    require(size <= most + _SPARE, CheckpointError, rule, size, remedy)
    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
        stored = all(part.compress_type == zipfile.ZIP_STORED for part in inside)
        require(stored, CheckpointError, rule, "packed entries", remedy)
        return torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(rule, str(error).partition("\n")[0], remedy) from error
