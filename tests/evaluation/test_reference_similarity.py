"""Features that stand in, MAUVE of drawn ones, similarity to held-out continuations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the `eval` extra")

from tests.evaluation.conftest import TEXT
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.errors import EvaluationError
from umim_core.evaluation.text_metrics.bertscore import BERTSCORE, TextFeatures, greedy_bertscore
from umim_core.evaluation.text_metrics.reference_similarity import (
    FEWEST_TEXTS,
    KINDS,
    MAUVE,
    References,
    chrf,
    mauve,
    reference_similarity,
    rouge,
)

TEXTS = ("the cat sat on the mat", "near the old house", "a dog")


@pytest.fixture(scope="module")
def backbone(backbone_path: Path) -> Backbone:
    return load_backbone(str(backbone_path))


@torch.no_grad()
def own_states(text: str, backbone: Backbone) -> torch.Tensor:
    """The last states as transformers gives them, of one text without padding."""
    ids = torch.tensor([backbone.encode(text)])
    states: torch.Tensor = backbone.model(ids, output_hidden_states=True).hidden_states[-1][0]
    return states


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_features_are_the_last_states_of_each_text_alone(
    batch_size: int, backbone: Backbone
) -> None:
    found = TextFeatures(backbone).of_tokens([*TEXTS, ""], batch_size)
    assert len(found) == 4 and found[3].shape == (0, backbone.hidden_size)
    for states, text in zip(found, TEXTS, strict=False):
        torch.testing.assert_close(states, own_states(text, backbone), rtol=1e-4, atol=1e-5)


def test_every_text_is_compared_with_its_own_reference(backbone: Backbone) -> None:
    references = References((*TEXTS[1:], TEXTS[0]), TextFeatures(backbone))
    found = reference_similarity(TEXTS, references)
    for number, (text, reference) in enumerate(zip(TEXTS, references.texts, strict=True)):
        row = {"references": [reference]}
        states = own_states(text, backbone), own_states(reference, backbone)
        wanted = rouge([text], row) | chrf([text], row) | {BERTSCORE: greedy_bertscore(*states)}
        assert {name: values[number] for name, values in found.by_text.items()} == pytest.approx(
            wanted, abs=1e-5
        )
    means = found.metrics()
    assert list(means) == [*KINDS, "chrf", BERTSCORE, MAUVE]
    assert means["chrf"] == pytest.approx(sum(found.by_text["chrf"]) / 3)
    assert math.isnan(means[MAUVE])  # three texts


def test_the_references_themselves_are_nearest_and_an_empty_text_is_farthest(
    backbone: Backbone,
) -> None:
    references = References(TEXTS, TextFeatures(backbone))
    for values in reference_similarity([*TEXTS[:2], ""], references).by_text.values():
        assert values == pytest.approx((1.0, 1.0, 0.0), abs=1e-6)


@pytest.mark.parametrize("count", [0, 2])
def test_every_text_needs_a_reference(count: int, backbone: Backbone) -> None:
    references = References(TEXTS[:1] if count else (), TextFeatures(backbone))
    with pytest.raises(EvaluationError, match="needs the continuation of its prompt"):
        reference_similarity(TEXTS[:count], references)


@pytest.mark.full  # mauve-text imports scikit-learn
def test_mauve_is_of_the_last_tokens_of_texts_that_are_not_empty(backbone: Backbone) -> None:
    pytest.importorskip("mauve", reason="mauve-text is the `metrics` extra")
    wanted = [TEXT[start : start + 9] for start in range(30)]
    texts = [TEXT[start : start + 5] for start in range(30)]
    found = reference_similarity(
        [*texts[:-1], ""], References(tuple(wanted), TextFeatures(backbone))
    )
    last = [
        np.stack([own_states(text, backbone)[-1].numpy() for text in part])
        for part in (texts[:-1], wanted)
    ]
    assert found.mauve == pytest.approx(mauve(*last), abs=1e-6)


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


@pytest.mark.full  # mauve-text imports scikit-learn
def test_mauve_is_high_for_one_distribution_low_for_two_and_the_same_again() -> None:
    pytest.importorskip("mauve", reason="mauve-text is the `metrics` extra")
    first, again = drawn(60, 1), drawn(60, 2)
    assert mauve(first, first) == pytest.approx(1.0, abs=1e-3)
    near = mauve(first, again)
    # Features are scaled to length 1: another distribution is one of other directions.
    assert near > 0.8 and mauve(first, again + 50) < 0.1
    assert mauve(first, again) == near


def test_too_few_texts_are_refused() -> None:
    enough, few = drawn(FEWEST_TEXTS, 1), drawn(FEWEST_TEXTS - 1, 1)
    for pair in ((enough, few), (few, enough)):
        with pytest.raises(EvaluationError, match="at least 20 texts and as many references"):
            mauve(*pair)
