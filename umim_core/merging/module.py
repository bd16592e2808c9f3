"""The merge module: a span's embeddings become one surrogate embedding.

``MergeModule(d)`` is the paper's attention pooling. Positions, depth and kind of a ``ModuleForm``
choose another, the last two a class and a file of ``forms/`` each:

=======================  ================================  ================  ================
form                     policies                          parameters        sees the order
=======================  ================================  ================  ================
``MergeModule``          the default                       2 d^2 + 7 d       no
                         positions learned                 2 d^2 + 11 d      yes
``ContextualPooling``    depth 3                           10 d^2 + 19 d     no
                         depth 3, positions learned        10 d^2 + 23 d     yes
``LinearMerge``          kind linear                       4 d^2 + 3 d       yes
``RuleRows``             rule_rows K, of any form          K d more          of K rules
=======================  ================================  ================  ================

Of rules of up to L tokens, more than 4, positions learned take L d parameters and kind linear
L d^2 + 3 d.
"""

from __future__ import annotations

import copy

from umim_core.merging.forms.attention_form import MergeModule
from umim_core.merging.forms.contextual_form import ContextualPooling
from umim_core.merging.forms.linear_form import LinearMerge
from umim_core.rules.ruleset import RuleSet

__all__ = ["ContextualPooling", "LinearMerge", "MergeModule", "with_rows_of"]


def with_rows_of(module: MergeModule, rules: RuleSet) -> MergeModule:
    """Return a module without the rule rows of spans that are no rules of a set."""
    rows = None if module.rows is None else module.rows.of_rules(rules)
    if rows is module.rows:
        return module
    copied = copy.deepcopy(module)
    copied.rows = rows
    return copied
