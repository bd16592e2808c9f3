"""Span eviction in kvpress: a question sees of each span its last column alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engines import ENGINES
from support.processes import ROOT, output_of
from umim_core.backbone.backbone import load_backbone
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.rules.ruleset import RuleSet

PYTHON = ENGINES / "kvpress" / "bin" / "python"


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `tools/engine.sh kvpress`")
def test_a_question_reads_what_the_press_left(tmp_path: Path) -> None:
    backbone = load_backbone("umim-docs-llama", dtype="float64")
    ids = list(map(int, backbone.encode(held_out_text()[:4000])[:220]))
    context, question = ids[:200], ids[200:]
    spans = {tuple(context[i : i + n]) for i, n in ((0, 2), (40, 3), (90, 4), (197, 3))}
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint)
    rules.save(tmp_path / "rules")
    backbone.model.save_pretrained(tmp_path / "model")
    command = [PYTHON, ROOT / "tests/support/kvpress_logits.py", "model", "rules", "out.npz"]
    asked = json.dumps({"context": context, "question": question})
    output_of(*command, stdin=asked, cwd=tmp_path, PYTHONPATH=str(ROOT))
    found = np.load(tmp_path / "out.npz")
    hidden = _inner(context, spans)
    assert found["columns"] == 200 - len(hidden) <= 193  # all four spans
    mask = torch.ones(220, 220, dtype=torch.bool).tril()
    mask[200:, hidden] = False
    with torch.no_grad():
        wanted = backbone.model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[
            0, 200:
        ]
    assert np.abs(found["logits"] - wanted.numpy()).max() < 1e-9


def _inner(ids: list[int], spans: set[tuple[int, ...]]) -> list[int]:
    """Columns of spans but for their last and the text's first; longest first, left to right."""
    taken: set[int] = set()
    inner: set[int] = set()
    for n in (4, 3, 2):
        for at in range(len(ids) - n + 1):
            places = set(range(at, at + n))
            if tuple(ids[at : at + n]) in spans and not places & taken:
                taken |= places
                inner |= places - {0, at + n - 1}
    return sorted(inner)
