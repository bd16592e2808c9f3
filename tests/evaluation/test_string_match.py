"""Matching of answers, on answers made by hand."""

from __future__ import annotations

import pytest

from umim_core.evaluation.text_metrics.string_match import exact_match, recall, substring_match


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (" 1234567, 7654321, 1111111 and 2222222.", 1.0),
        ("1234567 1234567 and 7654321", 0.5),
        ("123456", 0.0),
        ("", 0.0),
    ],
)
def test_recall_is_the_share_of_references_within(answer: str, share: float) -> None:
    row = {"references": ["1234567", "7654321", "1111111", "2222222"]}
    assert recall([answer], row) == {"recall": share}


@pytest.mark.parametrize(
    ("answer", "within", "exact"),
    [
        ("The Harlow Mill", 1.0, 1.0),
        ("It is the Harlow-Mill.", 0.0, 0.0),  # a hyphen joins words, as in SQuAD's script
        ("It was  harlow\nmill, in 1911", 1.0, 0.0),
        ("Harlow", 0.0, 0.0),
    ],
)
def test_matches_are_of_normalised_texts(answer: str, within: float, exact: float) -> None:
    row = {"references": ["other", "Harlow Mill"]}
    assert substring_match([answer], row) == {"substring_match": within}
    assert exact_match([answer], row) == {"exact_match": exact}
