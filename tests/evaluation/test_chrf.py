"""chrF of answers."""

from __future__ import annotations

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the `eval` extra")

from umim_core.evaluation.text_metrics.reference_similarity import chrf


def test_it_is_one_for_the_reference_and_the_best_of_several_counts() -> None:
    row = {"references": ["the cat sat", "a dog ran"]}
    assert chrf(["a dog ran"], row) == {"chrf": pytest.approx(1.0)}
    assert 0 < chrf(["the cats sit"], row)["chrf"] < 1
    assert chrf(["zzzz"], row) == {"chrf": 0.0}
    assert chrf(["the cat sat", "zzzz"], row) == {"chrf": pytest.approx(0.5)}
