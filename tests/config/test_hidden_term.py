"""Hidden-state terms in a configuration: names, dumps, and a cell's own terms."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from umim_core.config.hidden_term import HiddenTerm
from umim_core.config.recipe import Cell, DistillConfig

PLAIN = DistillConfig(max_steps=1)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("layers", "'last' or 'all'"),
        ("distance", "'smooth_l1' or 'mse'"),
        ("rows", "'attending' or 'aligned'"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str, known: str) -> None:
    with pytest.raises(ValidationError, match=known):
        DistillConfig(max_steps=1, hidden_terms=[{"layers": "last", name: "middle"}])


def test_two_terms_of_the_same_layers_are_refused() -> None:
    with pytest.raises(ValidationError, match="at most one last and one all"):
        DistillConfig(max_steps=1, hidden_terms=[{"layers": "all"}, {"layers": "all"}])


def test_terms_are_dumped_only_where_there_are_any() -> None:
    assert "hidden_terms" not in PLAIN.model_dump()
    assert "hidden_terms" not in Cell(backbone="b").model_dump()
    found = DistillConfig(max_steps=1, hidden_terms=[{"layers": "last"}])
    assert DistillConfig.model_validate_json(found.model_dump_json()) == found != PLAIN


def test_a_cell_may_have_terms_of_its_own() -> None:
    term = HiddenTerm(layers="all")
    both = PLAIN.model_copy(update={"hidden_terms": (term,)})
    assert Cell(backbone="b").distillation(both) is both
    assert Cell(backbone="b", hidden_terms=(term,)).distillation(PLAIN) == both
    assert Cell(backbone="b", hidden_terms=()).distillation(both) == PLAIN


def test_labels_say_what_deviates() -> None:
    terms = [{"layers": "last", "distance": "mse"}, {"layers": "all", "weight": 4.0}]
    assert Cell(backbone="b", hidden_terms=terms).term_words() == (
        "hidden states of the last layer mse",
        "hidden states of all layers weight 4",
    )
    assert Cell(backbone="b", hidden_terms=()).term_words() == ("no hidden states",)
    assert Cell(backbone="b").term_words() == ()
