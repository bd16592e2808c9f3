"""Border matching, unit positions, log-probabilities and what is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.engine_matrix import (
    CHEAP,
    CONFIGS,
    SAMPLED,
    VOCAB,
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
from umim_core.errors import GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.inference.request import Request
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
        settings(**SAMPLED),
        Request(seed=0, decode_max_damage=damage, observer=compare),
    )
    assert compact_differs


@pytest.mark.parametrize(
    ("name", "infix_free"),
    [
        pytest.param(name, i % 2 == 0, marks=[] if i % 4 in (0, 3) else pytest.mark.full)
        for i, name in enumerate(CONFIGS)
    ],
)
@torch.no_grad()
def test_border_matching_reads_prompt_and_output_as_one_text(name: str, infix_free: bool) -> None:
    backbone = build(name)
    module, matcher = module_for(backbone), random_rules(6, infix_free)
    prompts = random_prompts(8, 12)

    def compare(forward: Forward) -> None:
        for b in range(len(prompts)):
            text = [*prompts[b].tolist(), *forward.generated[b]]
            expected, units = from_scratch(backbone, module, matcher, [text])
            assert forward.lengths[b] == units
            assert float((forward.logits[b] - expected).abs().max()) <= 1e-5

    output = Engine(MergedModel(backbone, module, matcher, "compact")).generate(
        prompts,
        settings(**SAMPLED),
        Request(seed=0, match_border=True, observer=compare),
    )
    assert any(row.generated_spans and row.generated_spans[0][0] < 0 for row in output.rows)
    for b, row in enumerate(output.rows):
        text = np.array([*prompts[b].tolist(), *row.ids[:-1]], dtype=np.int64)
        found = [(int(s), int(n)) for s, n in zip(*matcher.segment(text), strict=True) if n > 1]
        assert [
            *row.prompt_spans,
            *((s + row.prompt_length, n) for s, n in row.generated_spans),
        ] == found


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(merge="prompt", match_border=True), "match_border needs merging"),
        (
            Request(merge="prompt", decode_max_damage=0.0),
            "decode_max_damage needs merging .* got merge 'prompt'. Merge all",
        ),
    ],
)
def test_options_of_merging_that_cannot_be_honoured_are_refused(
    request_: Request, message: str
) -> None:
    backbone = build("gpt2")
    engine = merging_engine(backbone, random_rules(1, infix_free=True))
    with pytest.raises(GenerationError, match=message):
        engine.generate([[1, 2]], settings(2), request_)


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_the_models_own(top: int) -> None:
    backbone = build("llama")
    engine = merging_engine(backbone, random_rules(2, infix_free=False))
    seen: list[torch.Tensor] = []
    output = engine.generate(
        random_prompts(4, 3),
        settings(**SAMPLED, top_k=2),
        Request(seed=0, logprobs=top, observer=lambda forward: seen.append(forward.logits)),
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


@pytest.mark.parametrize("asked", [-1, VOCAB + 1])
def test_more_log_probabilities_than_ids_are_refused(asked: int) -> None:
    with pytest.raises(GenerationError, match="logprobs must lie between 0 and 11"):
        Engine(MergedModel.without_merging(build("gpt2"))).generate(
            [[1]], settings(2), Request(logprobs=asked)
        )
