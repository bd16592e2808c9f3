"""Rules against a vocabulary: ids beyond it, and special tokens."""

from __future__ import annotations

import pytest

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import RuleSetError, TokenizerMismatchError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.protect import check_vocabulary
from umim_core.rules.ruleset import RuleSet


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    check_vocabulary(RuleSet.from_spans([(1, 31)]), 32, ())
    check_vocabulary(RuleSet.from_spans([]), 32, (0,))
    with pytest.raises(TokenizerMismatchError, match=r"0\.\.31, the tokenizer's .*; got 32"):
        check_vocabulary(RuleSet.from_spans([(1, 32)]), 32, ())


def test_a_special_token_in_a_rule_is_refused() -> None:
    rules = RuleSet.from_spans([(1, 2), (3, 7, 4), (5, 6, 7), (1, 2, 3)])
    check_vocabulary(rules, 32, (0, 8))
    with pytest.raises(RuleSetError, match=r"got \[3, 7, 4\] and 1 more of 3 tokens"):
        check_vocabulary(rules, 32, (0, 7))


@pytest.mark.parametrize("span", [(1, 0), (1, 32)])
def test_a_checkpoint_with_such_rules_is_refused(
    tiny_llama: Backbone, span: tuple[int, ...]
) -> None:
    rules = RuleSet.from_spans([span])  # of an unknown tokenizer
    checkpoint = Checkpoint.of(
        MergedModel(tiny_llama, MergeModule(tiny_llama.hidden_size), Matcher(rules), "compact")
    )
    with pytest.raises(
        (RuleSetError, TokenizerMismatchError), match=r"of the tokenizer|vocabulary"
    ):
        checkpoint.check_backbone(tiny_llama)
