"""Models with random weights, and an oracle of merging inside that never takes a trunk apart."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.split import layer_list
from umim_core.checkpoint.checkpoint import fresh_module
from umim_core.config.form import ModuleForm, UnitPositions
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def fresh_model(
    backbone: Backbone,
    rules: RuleSet | Iterable[tuple[int, ...]],
    std: float | None = None,
    seed: int = 0,
    unit_positions: UnitPositions = "compact",
    **form: Any,
) -> MergedModel:
    """A model that merges at the input, with the weights that training starts from.

    Spans are rules of the backbone's tokenizer; ``std`` is that of the surrogates, by default the
    embeddings'.
    """
    if not isinstance(rules, RuleSet):
        rules = RuleSet.from_spans(rules, backbone.tokenizer_fingerprint or None)
    module = MergeModule(backbone.hidden_size, ModuleForm(unit_positions=unit_positions, **form))
    std = backbone.embedding_std if std is None else std
    module.initialise(std, torch.Generator().manual_seed(seed))
    return MergedModel(backbone, module.to(backbone.dtype), Matcher(rules))


def placed(model: MergedModel, unit_positions: UnitPositions, merge_depth: int = 0) -> MergedModel:
    """The model, its weights shared, as if its module had been trained with other positions."""
    module = copy.copy(model.require_module())
    places = {"unit_positions": unit_positions, "merge_depth": merge_depth}
    module._form = module.form.model_copy(update=places)
    return replace(model, module=module)


def random_merged_model(
    backbone: Backbone,
    matcher: Matcher,
    depth: int,
    rank: int,
    rows: int = 0,
    positions: UnitPositions = "preserved",
) -> MergedModel:
    """A model whose module and adapters are far from zero."""
    form = ModuleForm(
        module_positions="learned",
        residual="last",
        unit_positions=positions,
        merge_depth=depth,
        adapter_rank=rank,
        rule_rows=rows,
    )
    module = fresh_module(backbone, matcher.rules, form, 0).to(backbone.dtype)
    generator = torch.Generator().manual_seed(5)
    moved = [module.norm_o.weight, module.norm_o.bias]
    moved += [] if module.rows is None else [module.rows.table]
    moved += [] if module.adapters is None else list(module.adapters.up.values())
    with torch.no_grad():
        for weight in moved:
            weight.normal_(0.0, 0.3, generator=generator)
    module.eval().requires_grad_(False)
    return MergedModel(backbone, module, matcher)


def oracle_states(
    merged_model: MergedModel, ids: Sequence[int], cuts: Sequence[tuple[int, int]]
) -> Tensor:
    """Hidden states of units [S, d], from one forward of the whole model on the raw ids.

    Nothing is taken apart: before layer k the last token's state of a span is replaced, and from
    there on the span's other columns are hidden by a mask. Adapters are added by hooks. The model
    is of float64, a unit (start, tokens).
    """
    backbone, module = merged_model.backbone, merged_model.require_module()
    depth, size = merged_model.merge_depth, len(ids)
    assert depth > 0  # at depth 0 learned positions are added after merging
    hidden = torch.zeros(size, dtype=torch.bool)
    for start, tokens in cuts:
        hidden[start : start + tokens - 1] = True
    ends = [start + tokens - 1 for start, tokens in cuts if tokens > 1]
    causal = torch.ones(size, size).tril().bool()
    seen = causal & ~hidden | torch.eye(size, dtype=torch.bool)
    masks = [
        torch.zeros(size, size, dtype=backbone.dtype).masked_fill(~m, -1e30)[None, None]
        for m in (causal, seen)
    ]
    holder, name = layer_list(backbone.model)
    handles: list[Any] = []

    def replaced(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0].clone()
        for start, tokens in cuts:
            if tokens > 1:
                states[0, start + tokens - 1] = _merged(module, args[0][0], ids, start, tokens)
        return (states, *args[1:]), kwargs

    def mask_of(number: int) -> Any:
        def with_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mask = masks[number >= depth]
            if "attention_mask" in kwargs:
                return args, kwargs | {"attention_mask": mask}
            return (*args[:2], mask, *args[3:]), kwargs  # GPT-2 passes it by place

        return with_mask

    def adapter(linear_name: str, number: int) -> Any:
        def add(linear: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            assert module.adapters is not None
            key = linear_name.replace(".", "-")
            down = module.adapters.down[key][number - depth]
            up = module.adapters.up[key][number - depth]
            out = out.clone()
            for end in ends:
                out[0, end] += args[0][0, end] @ down @ up
            return out

        return add

    for number, layer in enumerate(getattr(holder, name)):
        handles.append(layer.register_forward_pre_hook(mask_of(number), with_kwargs=True))
        if number == depth:
            handles.append(layer.register_forward_pre_hook(replaced, with_kwargs=True))
        if number >= depth and module.adapters is not None:
            handles += [
                linear.register_forward_hook(adapter(part, number))
                for part, linear in layer.named_modules()
                if isinstance(linear, nn.Linear | Conv1D)
            ]
    try:
        states = backbone.hidden(
            backbone.embed(torch.tensor([list(ids)])), None, torch.arange(size)[None]
        )[0]
    finally:
        for handle in handles:
            handle.remove()
    return states[[start + tokens - 1 for start, tokens in cuts]]


def _merged(
    module: MergeModule, states: Tensor, ids: Sequence[int], start: int, tokens: int
) -> Tensor:
    """The state of one span by the formula: h_b + rms(h_b) (module(h / rms(h)) + its row)."""
    span = states[start : start + tokens]
    scale = span.pow(2).mean(dim=1, keepdim=True).sqrt()
    added = module.merge((span / scale)[None], torch.tensor([tokens]))[0]
    if module.rows is not None:
        own = torch.tensor([list(ids[start : start + tokens])])
        added = added + module.rows(own, torch.tensor([tokens]))[0]
    return span[-1] + scale[-1] * added


def units_of_lengths(lengths: Sequence[int]) -> Segmentation:
    sizes = np.array(lengths, dtype=np.int64)
    return np.cumsum(sizes) - sizes, sizes


def cuts_of(matcher: Matcher, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Units (start, tokens) of a text."""
    starts, lengths = matcher.segment(np.array(ids, dtype=np.int64))
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))
