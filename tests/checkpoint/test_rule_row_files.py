"""Rule rows in a checkpoint: round trip, refusal of what does not fit, and rules that go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.merge_modules import FORMS, give_rows, module_of
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import CheckpointError
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import write_manifest

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


def make(backbone: Backbone, form: str = "paper") -> Checkpoint:
    """A checkpoint whose first two rules have rows."""
    module = give_rows(module_of(form, backbone.hidden_size), SPANS[:2])
    return Checkpoint.of(
        MergedModel(backbone, module, Matcher(RuleSet.from_spans(SPANS)), "compact")
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_back_with_their_spans(tiny_llama: Backbone, form: str, tmp_path: Path) -> None:
    checkpoint = make(tiny_llama, form)
    checkpoint.save(tmp_path / "x")
    back = Checkpoint.load(tmp_path / "x")
    assert back.config == checkpoint.config
    assert back.config.rule_rows == 2
    assert back.module.digest() == checkpoint.module.digest()
    ids, lengths = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]]), torch.tensor([2, 3, 4])
    spans = tiny_llama.embed(ids)
    assert torch.equal(back.module(spans, lengths, ids), checkpoint.module(spans, lengths, ids))
    assert not any(parameter.requires_grad for parameter in back.module.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("rows.spans"), "must hold the tensors"),
        (lambda weights: weights["rows.spans"].copy_(torch.zeros(2, 4)), "rule rows of spans"),
        (lambda weights: weights.update({"rows.spans": torch.zeros(2, 4)}), "spans of int32"),
        (lambda weights: weights["rows.spans"][0].fill_(1), "own rules alone; got 1 of 2"),
        (lambda weights: weights["rows.table"].fill_(torch.inf), r"got \['rows\.table'\]"),
    ],
    ids=["missing", "no spans", "no ids", "another rule", "infinite"],
)
def test_rule_rows_that_do_not_fit_are_refused(
    tiny_llama: Backbone,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    checkpoint = make(tiny_llama)
    checkpoint.save(tmp_path / "x")
    weights = dict(checkpoint.module.state_dict())
    change(weights)
    save_file(weights, tmp_path / "x" / "model.safetensors")
    write_manifest(tmp_path / "x", kind="checkpoint", schema=1, body={})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.load(tmp_path / "x")


def test_rows_of_other_rules_than_the_matchers_are_not_saved(
    tiny_llama: Backbone, tmp_path: Path
) -> None:
    module = give_rows(module_of("paper", tiny_llama.hidden_size), SPANS)
    matcher = Matcher(RuleSet.from_spans(SPANS[1:]))
    Checkpoint.of(MergedModel(tiny_llama, module, matcher, "compact")).save(tmp_path / "x")
    back = Checkpoint.load(tmp_path / "x")
    assert back.config.rule_rows == 2
    assert back.module.rows.spans.tolist() == [[3, 4, 5, -1], [6, 7, 8, 9]]
    assert torch.equal(back.module.rows.table, module.rows.table[1:])


def test_rows_stay_with_their_rules(tiny_llama: Backbone) -> None:
    checkpoint = make(tiny_llama)
    kept = checkpoint.with_contents(checkpoint.module, RuleSet.from_spans([(3, 4, 5), (8, 9)]))
    assert (kept.config.rule_rows, kept.module.rows.spans.tolist()) == (1, [[3, 4, 5, -1]])
    assert torch.equal(kept.module.rows.table, checkpoint.module.rows.table[1:])
    assert (checkpoint.config.rule_rows, len(checkpoint.module.rows)) == (2, 2)
    none = checkpoint.with_contents(checkpoint.module, RuleSet.from_spans([(8, 9)]))
    assert (none.config.rule_rows, none.module.rows) == (0, None)
