"""Rule rows: lookup against a dictionary, the choice of rules, and what they add to a form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.merge_modules import FORMS, give_rows, module_of
from umim_core.errors import ConfigError
from umim_core.merging.rule_rows import RuleRows, frequent_spans
from umim_core.rules.grams import LONGEST
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID

IDS = torch.tensor([[7, 8, 9, 0], [5, 6, 0, 0], [7, 8, 5, 5], [1, 2, 3, 4], [1, 2, 3, 4]])
LENGTHS = torch.tensor([3, 2, 2, 4, 3])
ROWS = [(7, 8), (7, 8, 9), (1, 2, 3, 4)]


@pytest.mark.parametrize("top", [3, MAX_TOKEN_ID + 1], ids=["few ids", "all ids"])
@pytest.mark.parametrize("width", [2, 3, LONGEST, 7, 16])
def test_lookup_equals_a_dictionary(top: int, width: int, torch_rng: torch.Generator) -> None:
    def drawn(count: int) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
        ids = torch.randint(top, (count, width), generator=torch_rng)
        lengths = torch.randint(1, width + 1, (count,), generator=torch_rng)
        pairs = zip(ids.tolist(), lengths.tolist(), strict=True)
        return ids, lengths, [tuple(span[:length]) for span, length in pairs]

    known = {span for span in drawn(30)[2] if len(span) > 1}
    rules = RuleSet.from_spans(known)
    rows = RuleRows(frequent_spans(rules, len(rules)), 1)
    places = {tuple(x for x in span if x >= 0): k for k, span in enumerate(rows.spans.tolist())}
    ids, lengths, spans = drawn(200)
    if top > 3:  # so many ids never meet by chance
        ids = torch.cat([ids, torch.tensor([[*s, *[0] * (width - len(s))] for s in known])])
        lengths = torch.cat([lengths, torch.tensor([len(span) for span in known])])
        spans += list(known)
    found, is_own = rows.find(ids, lengths)
    assert is_own.tolist() == [span in places for span in spans]
    assert found[is_own].tolist() == [places[span] for span in spans if span in places]


def test_the_most_frequent_rules_get_the_rows() -> None:
    rules = RuleSet.from_spans([(1, 2), (3, 4), (5, 6), (3, 4, 5), (9, 9)])
    rules.support_by_order[2][:] = [4, 7, 7, 7]
    rules.support_by_order[3][:] = [9]
    assert frequent_spans(rules, 3).tolist() == [[3, 4, -1, -1], [3, 4, 5, -1], [5, 6, -1, -1]]
    assert len(frequent_spans(rules, 99)) == 5
    start = RuleRows.of_frequent(rules, 2, 1)
    start.table.data[:] = 5.0
    further = RuleRows.of_frequent(rules, 3, 1, start)
    assert start.spans.tolist() == [[3, 4, -1, -1], [3, 4, 5, -1]]
    assert further.table.flatten().tolist() == [5.0, 5.0, 0.0]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_added_to_what_any_form_gives(form: str, torch_rng: torch.Generator) -> None:
    spans = torch.randn(len(IDS), 4, 16, generator=torch_rng)
    alone, rowed = module_of(form), give_rows(module_of(form), ROWS)
    added = rowed(spans, LENGTHS, IDS) - alone(spans, LENGTHS)
    for offset, place in zip(added, [2, None, 1, 0, None], strict=True):
        want = torch.zeros(16) if place is None else rowed.rows.table[place]
        assert torch.allclose(offset, want, rtol=0, atol=1e-5)
    with torch.no_grad():
        rowed.rows.table.zero_()  # as before training
    assert torch.equal(rowed(spans, LENGTHS, IDS), alone(spans, LENGTHS))


def test_longer_spans_have_no_row_and_without_ids_there_is_none() -> None:
    module = give_rows(module_of("paper"), ROWS)
    ids, lengths = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]), torch.tensor([5, 4])
    assert module.rows.find(ids, lengths)[1].tolist() == [False, True]
    with pytest.raises(ConfigError, match="rule rows needs the ids"):
        module(torch.zeros(1, 2, 16), torch.tensor([2]))


@pytest.mark.parametrize(
    "spans",
    [
        [[1, 2, -1, -1], [1, 2, -1, -1]],
        [[3, 4, -1, -1], [1, 2, -1, -1]],
        [[1, -1, -1, -1]],
        [[1, 2, -1, 4]],
        [[1, 2, 3, MAX_TOKEN_ID + 1]],
        [[1, -2, -1, -1]],
        [[1, 2, 3]],
        [[1] * 17],
    ],
    ids=["twice", "falling", "one id", "a gap", "beyond all ids", "negative", "narrow", "wide"],
)
def test_spans_that_are_no_rules_are_refused(spans: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"spans of (2 to 4|4 to 16) ids"):
        RuleRows(torch.tensor(spans, dtype=torch.int32), 4)
