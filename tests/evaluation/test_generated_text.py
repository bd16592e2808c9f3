from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge
from umim_core.evaluation.generated_rows import GeneratedText
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import RowOutput
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

PROMPTS = ("the cat sat on the mat and the dog", "by the sea the old cat house near")


def generate(merged_model: MergedModel, merge: Merge) -> tuple[RowOutput, ...]:
    rows = [np.asarray(merged_model.backbone.encode(text)) for text in PROMPTS]
    return Engine(merged_model).generate(rows, GenerateOptions(max_new_tokens=16, merge=merge)).rows


@pytest.fixture
def merged_model(checkpoint_path: Path) -> MergedModel:
    """Rules that the model's own answers begin with, and one of a prompt."""
    own = UMIM.from_pretrained(Checkpoint.load(checkpoint_path), dtype="float32").merged_model
    starts = [row.ids[:6] for row in generate(own, "none")]
    spans = {tuple(ids[a : a + 3]) for ids in starts for a in (0, 3)}
    spans.add(tuple(own.backbone.encode(PROMPTS[0])[:2]))
    fingerprint = own.backbone.tokenizer_fingerprint
    return own.merging_by(Matcher(RuleSet.from_spans(spans, tokenizer_fingerprint=fingerprint)))


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_reductions_are_the_counted_ones(merge: Merge, merged_model: MergedModel) -> None:
    """U_t is counted by segmenting the first t generated ids alone, for every t."""
    segment = merged_model.require_matcher().segment
    saved = np.zeros(3)
    for row in generate(merged_model, merge):
        ids, fed = np.asarray(row.ids), len(row.ids) - 1
        units = [len(segment(ids[:t])[0]) if merge == "all" else t for t in range(1, fed + 1)]
        prompt = np.asarray(row.prompt_ids)
        text = GeneratedText.of_row("any", row, len(prompt))
        assert text.reductions == {
            "prompt_tr": pytest.approx(1 - len(segment(prompt)[0]) / len(prompt)),
            "gen_kv_tr": pytest.approx(1 - units[-1] / fed),
            "cumulative_kv_tr": pytest.approx(1 - sum(units) / sum(range(1, fed + 1))),
        }
        saved += list(text.reductions.values())
    assert (saved > 0).tolist() == [True, merge == "all", merge == "all"]
