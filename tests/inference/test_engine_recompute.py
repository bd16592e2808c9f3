"""Every step of the engine against a forward from scratch, over all that may change it."""

from __future__ import annotations

import numpy as np
import torch

from support.engine_matrix import (
    CHEAP,
    CONFIGS,
    SAMPLED,
    VOCAB,
    Prompt,
    build,
    cheap_rules,
    from_scratch,
    module_for,
    priced_rules,
    random_prompts,
    settings,
    tail_apart,
)
from support.merge_modules import give_rows
from support.merged_models import oracle_states, placed, random_merged_model
from support.pairwise import pairwise
from umim_core.backbone.backbone import Backbone
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward, Generation
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

# Family, attention, type, tolerance, and where spans merge. transformers computes some parts in
# float32 whatever the model: GPT-Neo's scores and the softmax of Llama-like eager attention.
EXACT = [(name, "sdpa", torch.float64, 1e-10) for name in CONFIGS if name != "gpt-neo"]
ROUNDED = [
    ("gpt-neo", "eager", torch.float64, 1e-5),
    ("llama", "eager", torch.float64, 1e-5),
    ("gpt2", "eager", torch.float64, 1e-10),
    ("llama", "sdpa", torch.float32, 1e-5),
    ("gpt2", "sdpa", torch.float32, 1e-5),
]
CASES = [
    *((*case, form) for case in (*EXACT, *ROUNDED) for form in ("compact", "preserved")),
    *((*EXACT[0], form) for form in ("depth", "depth-adapters")),
    *((name, "sdpa", torch.float64, 1e-10, "depth-adapters") for name in ("qwen2", "gpt2")),
    ("mistral", "sdpa", torch.float64, 1e-10, "depth"),
]
Case = tuple[str, str, torch.dtype, float, str]


def merged_model(backbone: Backbone, matcher: Matcher, form: str, rule_rows: bool) -> MergedModel:
    if form.startswith("depth"):
        rank = 3 if form == "depth-adapters" else 0
        return random_merged_model(backbone, matcher, 1, rank, rows=20 * rule_rows)
    module = module_for(backbone, matcher.rules.longest)
    if rule_rows:
        orders = matcher.rules.ids_by_order.values()
        give_rows(module, [ids for rows in orders for ids in rows[::2].tolist()])
    return placed(MergedModel(backbone, module, matcher), form)


def recomputed(model: MergedModel, prompts: list[Prompt]) -> list[tuple[torch.Tensor, int]]:
    """Logits behind each prompt's parts, which are matched apart, and the units they make."""
    backbone = model.backbone
    if not model.merge_depth:
        return from_scratch(backbone, model.require_module(), prompts, model.unit_positions)
    found = []
    for matchers, parts in prompts:
        units, ids = [], list[int]()
        assert not isinstance(matchers, Matcher)
        for matcher, part in zip(matchers, parts, strict=True):
            cut = zip(*matcher.segment(np.array(part, dtype=np.int64)), strict=True)
            units += [(len(ids) + int(start), int(length)) for start, length in cut]
            ids += part
        found.append((backbone.head(oracle_states(model, ids, units)[-1]), len(units)))
    return found


@pairwise(
    case=CASES,
    rows=[1, 4],
    turns=[1, 3],
    infix_free=[True, False],
    rule_rows=[False, True],
    reading=[(0, None), (3, None), (0, CHEAP)],
    longest=[4, 9],
)
@torch.no_grad()
def test_engine_equals_recompute(
    case: Case,
    rows: int,
    turns: int,
    infix_free: bool,
    rule_rows: bool,
    reading: tuple[int, float | None],
    longest: int,
) -> None:
    name, attention, dtype, tolerance, form = case
    (raw_tail, damage), new = reading, 12 if turns == 1 else 6
    matcher = priced_rules(3, infix_free, longest)
    few = {} if longest == 4 else {"suppress_tokens": list(range(2, VOCAB))}
    decoding = matcher if damage is None else cheap_rules(matcher)
    model = merged_model(build(name, dtype, attention), matcher, form, rule_rows)
    parts: list[list[list[int]]] = [[] for _ in range(rows)]
    by: list[list[Matcher]] = [[] for _ in range(rows)]
    prompts, steps = list[Prompt](), list[tuple[torch.Tensor, int]]()
    chosen = dict[int, list[int]]()

    def keep(forward: Forward) -> None:
        for b in range(rows):
            assert forward.running[b]
            chosen[b] = list(forward.generated[b])
            prompts.append(([*by[b], decoding], [*parts[b], chosen[b]]))
            steps.append((forward.logits[b].clone(), forward.lengths[b]))

    output: Generation | None = None
    for turn in range(turns):
        asked = random_prompts(5 + turn, rows, 2 if few else VOCAB)
        for b, prompt in enumerate(asked):
            if output is not None:  # it was not fed; no rule crosses into the new turn
                parts[b].append([output.rows[b].ids[-1]])
            parts[b] += tail_apart(prompt, raw_tail)
            by[b] += [matcher] * (len(parts[b]) - len(by[b]))
        options = settings(
            new,
            **SAMPLED,
            **few,
            seed=turn,
            raw_tail=raw_tail,
            decode_max_damage=damage,
            observer=keep,
        )
        past = None if output is None else output.state
        output = Engine(model).generate(asked, options, past=past)
        for b, row in enumerate(output.rows):
            assert row.ids[:-1] == tuple(chosen[b])  # no merge altered what was chosen
            spans = [
                (int(s), int(n))
                for s, n in zip(*decoding.segment(np.array(chosen[b])), strict=True)
            ]
            assert row.generated_spans == tuple((s, n) for s, n in spans if n > 1)
            parts[b].append(list(row.ids[:-1]))
            by[b].append(decoding)
    assert output is not None and len(steps) == turns * new * rows
    for (_, said), step, found in zip(prompts, steps, recomputed(model, prompts), strict=True):
        assert step[1] == found[1]
        error = float((step[0] - found[0]).abs().max())
        assert error <= max(tolerance, 1e-5 if turns > 1 else 0), (said, error)
    if turns == 1:  # something was rolled back
        assert any(row.gen_kv_reduction > 0 for row in output.rows)
