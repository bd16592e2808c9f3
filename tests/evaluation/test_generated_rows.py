"""Texts generated under policies of the KV cache through lm-eval's model: budgets and lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from umim_core.evaluation.generated_rows import RowWriter
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.method_scoring import EvictedScorer
from umim_core.inference.request import Request

PROMPT = "the cat sat on the mat and the dog"
GREEDY = {"until": [], "max_gen_toks": 5, "do_sample": False}


@pytest.mark.parametrize(
    ("method", "target"), [("full-cache", None), ("h2o", 0.4), ("streaming-llm", None)]
)
def test_a_cache_policy_decodes_with_the_budget_of_all_that_was_read(
    checkpoint_path: Path, method: str, target: float | None
) -> None:
    model = UmimLM(checkpoint_path, method=method, target_tr=target, dtype="float32")
    scorer = model.scorer
    assert isinstance(scorer, EvictedScorer)
    writer = RowWriter.of(scorer, "prompt")
    context = np.array(model.backbone.encode(PROMPT))
    wanted = replace(model._wanted(GREEDY), new_tokens=9)
    [row] = writer.write([context], wanted, Request())
    lengths, ids = row.output.cache_lengths, np.array(row.ids)
    assert len(lengths) == len(ids) == 9
    assert row.sizes.columns == lengths[0]
    if method == "full-cache":
        assert lengths == tuple(len(context) + fed for fed in range(9))
        base = torch.tensor([context.tolist()])
        out = model.backbone.model.generate(
            base, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert ids.tolist() == out[0, len(context) :].tolist()
        return
    for fed, held in enumerate(lengths):
        read = len(context) + fed
        allowed = len(model.compressed.segment(context)[0]) + fed
        allowed = allowed if target is None else read - round(target * read)
        before = lengths[fed - 1] + 1 if fed else read
        assert held == min(allowed, before)
    if target is None:
        own = RowWriter.of(UmimLM(checkpoint_path, dtype="float32").scorer, "prompt")
        assert own.write([context], wanted, Request())[0].output.cache_lengths == lengths
    assert row.sizes.shortfall == 0
