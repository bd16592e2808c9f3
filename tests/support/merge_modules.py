"""Every form of the merge module with weights far from symmetric, and their formulas in scalars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from umim_core.config.form import ModuleForm
from umim_core.merging.forms.rule_rows import RuleRows, frequent_spans
from umim_core.merging.module import MergeModule
from umim_core.rules.ruleset import RuleSet

Row = list[float]
FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "learned": {"module_positions": "learned"},
    "depth 3": {"depth": 3},
    "depth 3, learned": {"depth": 3, "module_positions": "learned"},
    "linear": {"kind": "linear"},
    "learned, last residual": {"module_positions": "learned", "residual": "last"},
    "linear, exponential residual": {"kind": "linear", "residual": "exponential"},
}


def module_of(
    form: str, size: int = 16, heads: int = 4, dtype: torch.dtype = torch.float32, longest: int = 4
) -> MergeModule:
    """Return a frozen module whose attention is far from uniform and whose biases count."""
    module = MergeModule(size, ModuleForm(**FORMS[form]), heads, longest)
    generator = torch.Generator().manual_seed(4)
    module.initialise(0.7, generator)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in ("query", "offset"):
                parameter.normal_(0.0, 1.0, generator=generator)
            if name.endswith("linear_qkv.weight"):  # scores of about 1 in each head
                parameter.normal_(0.0, 0.25, generator=generator)
            if name == "norm_o.weight":  # of a residual it begins at zero
                parameter.fill_(0.7)
            if name == "norm_o.bias":
                parameter.normal_(0.0, 0.1, generator=generator)
    return module.to(dtype).requires_grad_(False)


def give_rows(module: MergeModule, spans: Iterable[Sequence[int]]) -> MergeModule:
    """Give a module rule rows of those spans, numbers of about 1; return it."""
    rules = RuleSet.from_spans(map(tuple, spans))
    module.rows = RuleRows(frequent_spans(rules, len(rules)), module.hidden_size).to(module.dtype)
    with torch.no_grad():
        module.rows.table.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(6))
    return module.requires_grad_(module.norm_o.weight.requires_grad)


def spans_of(count: int, width: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return random spans [count, width, size]."""
    return torch.randn(count, width, size, generator=generator)


def layer_norm(x: Row, norm: nn.LayerNorm) -> Row:
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return [
        g * (v - mean) / math.sqrt(variance + 1e-5) + b
        for v, g, b in zip(x, norm.weight.tolist(), norm.bias.tolist(), strict=True)
    ]


def linear(x: Row, layer: nn.Linear) -> Row:
    rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    return [sum(w * v for w, v in zip(row, x, strict=True)) + bias for row, bias in rows]


def gelu_of_linear(x: Row, layer: nn.Linear) -> Row:
    return [0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0))) for v in linear(x, layer)]


def attend(query: Row, keys: list[Row], values: list[Row]) -> Row:
    """Softmax-weighted mean of the values of one head."""
    scores = [sum(a * b for a, b in zip(k, query, strict=True)) / len(query) ** 0.5 for k in keys]
    total = sum(map(math.exp, scores))
    weights = [math.exp(s) / total for s in scores]
    return [
        sum(w * v[i] for w, v in zip(weights, values, strict=True)) for i in range(len(values[0]))
    ]


def with_offsets(module: MergeModule, span: list[Row]) -> list[Row]:
    """Embeddings with the vector of their offset, counted from the end in long spans."""
    if module.form.module_positions == "none":
        return span
    offsets = module.offset.tolist()
    if module.longest > 4:
        offsets = offsets[: len(span)][::-1]
    return [[v + o for v, o in zip(e, offsets[t], strict=True)] for t, e in enumerate(span)]


def pooled(module: MergeModule, span: list[Row]) -> Row:
    """Attention pooling of what is left of a span."""
    projected = [layer_norm(gelu_of_linear(e, module.linear_kv), module.norm_kv) for e in span]
    width = module.hidden_size // module.num_heads
    joined: Row = []
    for head, query in enumerate(module.query.tolist()):
        part = [p[head * width : (head + 1) * width] for p in projected]
        joined += attend(query, part, part)
    return layer_norm(gelu_of_linear(joined, module.linear_o), module.norm_o)


def uniform(
    layer: nn.Linear, bound: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw weight, then bias, as a linear layer is initialised."""
    return (
        torch.empty(layer.weight.shape).uniform_(-bound, bound, generator=generator),
        torch.empty(layer.bias.shape).uniform_(-bound, bound, generator=generator),
    )
