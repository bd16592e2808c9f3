"""Every form of the merge module, with weights far from symmetric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from umim_core.config.form import ModuleForm
from umim_core.merging.module import MergeModule
from umim_core.merging.rule_rows import RuleRows, frequent_spans
from umim_core.rules.ruleset import RuleSet

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
