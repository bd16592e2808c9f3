"""Border matching, unit positions, log-probabilities and what is reported."""

from __future__ import annotations

import pytest
import torch

from support.engine_matrix import (
    CHEAP,
    CONFIGS,
    SAMPLED,
    build,
    cheap_rules,
    from_scratch,
    merging_engine,
    module_for,
    priced_rules,
    random_prompts,
    random_rules,
    settings,
)
from support.pairwise import pairwise
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.merging.merged_model import MergedModel


@pairwise(name=list(CONFIGS), rows=[1, 4], infix_free=[True, False], damage=[None, CHEAP])
@torch.no_grad()
def test_with_preserved_positions_every_step_equals_a_forward_from_scratch(
    name: str, rows: int, infix_free: bool, damage: float | None
) -> None:
    backbone = build(name)
    module, matcher = module_for(backbone), priced_rules(3, infix_free)
    by = [matcher, matcher if damage is None else cheap_rules(matcher)]
    prompts = random_prompts(5, rows)
    compact_differs = False

    def compare(forward: Forward) -> None:
        nonlocal compact_differs
        for b, prompt in enumerate(prompts):
            parts = [prompt.tolist(), forward.generated[b]]
            expected, _ = from_scratch(backbone, module, by, parts, "preserved")
            assert float((forward.logits[b] - expected).abs().max()) <= 1e-5
            other, _ = from_scratch(backbone, module, by, parts, "compact")
            compact_differs |= float((forward.logits[b] - other).abs().max()) > 1e-3

    Engine(MergedModel(backbone, module, matcher, "preserved")).generate(
        prompts,
        settings(**SAMPLED, seed=0, decode_max_damage=damage, observer=compare),
    )
    assert compact_differs


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_the_models_own(top: int) -> None:
    backbone = build("llama")
    engine = merging_engine(backbone, random_rules(2, infix_free=False))
    seen: list[torch.Tensor] = []
    output = engine.generate(
        random_prompts(4, 3),
        settings(
            **SAMPLED,
            top_k=2,
            seed=0,
            logprobs=top,
            observer=lambda forward: seen.append(forward.logits),
        ),
    )
    for b, row in enumerate(output.rows):
        table = torch.stack([logits[b] for logits in seen]).log_softmax(dim=-1)
        chosen = table[torch.arange(len(row.ids)), torch.tensor(row.ids)]
        assert row.logprobs == pytest.approx(chosen.tolist(), abs=1e-12)
        assert row.top_logprobs is not None
        best = [[token for token, _ in step] for step in row.top_logprobs]
        assert best == table.argsort(dim=-1, descending=True)[:, :top].tolist()
        values = [[value for _, value in step] for step in row.top_logprobs]
        assert torch.allclose(torch.tensor(values), table.float().sort(descending=True)[0][:, :top])
