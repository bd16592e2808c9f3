"""Evaluation on the second device; ``test_second_device.py`` runs it in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine_matrix import build
from support.merge_modules import module_of
from support.second_device import DEVICE, moved, second_device
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.generation_quality import continuation_perplexity
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.qualitative import attention_maps, surrogate_similarity
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.mining.confidence import confidence_counts
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.roofline import Roofline
from umim_core.throughput.throughput import measure_throughput

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w11 w1 w2 w12 w1 w2"
RULES = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5), (6, 7)]))
ROWS = [np.array([9, 1, 2, 7, 3, 4, 5, 8]), np.array([6, 7, 10]), np.array([1, 2, 1, 2, 9])]


def evaluated(what: str, backbone: Backbone, module: MergeModule) -> dict[str, Any]:
    if what == "alignment":
        return evaluate_alignment(
            ROWS, MergedModel(backbone, module, RULES, "compact"), 2
        ).metrics()
    if what == "perplexity":
        return vars(perplexity(ROWS, MergedModel(backbone, module, RULES, "compact"), 2))
    if what == "attention maps":
        maps = attention_maps(ROWS[0], MergedModel(backbone, module, RULES, "preserved"))
        return {"before": maps.before.tolist(), "after": maps.after.tolist(), "at": maps.starts}
    if what == "continuations":
        return {"ppl": continuation_perplexity([[1, 2], [3]], [[4, 5, 6], []], backbone)}
    if what == "confidence":
        flat, borders = np.concatenate(ROWS), np.cumsum([0, *map(len, ROWS)])
        spans, support = confidence_counts(backbone, flat, borders, min_probability=0.1)
        return {f"{n}": [*spans[n].ravel(), *support[n]] for n in spans}
    if what == "throughput":
        protocol = BenchmarkConfig(warmup=0, pairs=1, new_tokens=3, prompt_lengths=(16,))
        ids, ceiling = np.arange(64) % 7 + 1, Roofline(1e30)
        rows = measure_throughput(
            MergedModel(backbone, module, RULES, "compact"), ids, protocol, roofline=ceiling
        )
        return {f"{r.rules} {r.phase}": [r.token_reduction, r.umim_kv_bytes] for r in rows}
    found = surrogate_similarity(
        [(1, 2), (3, 4, 5), (6, 7)], MergedModel(backbone, module, None, "compact")
    )
    return {str(order.order): [*order.by_offset, order.mean, order.random] for order in found}


@pytest.mark.parametrize(
    "what",
    [
        "alignment",
        "perplexity",
        "attention maps",
        "similarity",
        "continuations",
        "confidence",
        "throughput",
    ],
)
def test_what_is_measured_equals_what_the_cpu_measures(what: str) -> None:
    expected = evaluated(what, build("llama", torch.float32), module_of("learned", 32))
    with second_device():
        backbone, module = build("llama", torch.float32), module_of("learned", 32)
        moved(backbone.model)
        moved(module)
        found = evaluated(what, backbone, module)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        flat, wanted = np.ravel(found[name]), np.ravel(value)
        assert flat == pytest.approx(wanted, rel=1e-4, abs=1e-6), name


def test_the_lm_eval_model_answers_as_on_the_cpu(tiny_checkpoint: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")
    from lm_eval.api.instance import Instance

    from umim_core.evaluation.harness import UmimLM

    def answers_on(device: str) -> tuple[list[Any], list[Any]]:
        model = UmimLM(str(tiny_checkpoint), "all", device=device, batch_size=2)
        pairs = [(TEXT, " w3 w4"), ("w1 w2", " w5"), ("w6", " w1 w2")]
        rolling = [Instance("loglikelihood_rolling", {}, (TEXT,), 0)]
        settings = {"until": [], "max_gen_toks": 5, "do_sample": False}
        asked = [Instance("generate_until", {}, (TEXT, settings), 0)]
        scored = model.loglikelihood(
            [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        )
        numbers = [value for value, _ in scored] + model.loglikelihood_rolling(rolling)
        return numbers, [greedy for _, greedy in scored] + model.generate_until(asked)

    numbers, others = answers_on("cpu")
    with second_device():
        found = answers_on(DEVICE)
    assert found[0] == pytest.approx(numbers, rel=1e-5)
    assert found[1] == others


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_loaded_in_half_precision_reads_and_writes(
    dtype: str, tiny_checkpoint: Path
) -> None:
    expected = UMIM.from_pretrained(tiny_checkpoint, dtype=dtype).perplexity(TEXT)
    with second_device():
        model = UMIM.from_pretrained(tiny_checkpoint, dtype=dtype, device=DEVICE)
        assert model.generate(TEXT, max_new_tokens=4, do_sample=True).ids[0]
        assert model.perplexity(TEXT) == pytest.approx(expected, rel=2e-2)
