from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.errors import BackboneError, CorpusError, EvaluationError
from umim_core.evaluation.language_model import LanguageModelScore, score_language_model

TEXTS = ["w1 w2 w3 w4 w5", "w6", "w7 w8 w9 w1 w2 w3 w4"]
STREAM = [0, 1, 2, 3, 4, 5, 0, 6, 0, 7, 8, 9, 1, 2, 3, 4, 0]  # <eos> is 0


@torch.no_grad()
def nats(backbone: Backbone, length: int) -> float:
    """One forward per target, of exactly what the window shows before it."""
    total = 0.0
    for target in range(1, len(STREAM)):
        start = (target - 1) // (length - 1) * (length - 1)
        seen = torch.tensor(STREAM[start:target])
        logits = backbone.model(input_ids=seen[None]).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[STREAM[target]])
    return total


@pytest.mark.parametrize("length", [2, 3, 5, 17, 64])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_token_and_every_document_end_is_predicted_once(
    tiny_backbone: Backbone, length: int, batch_size: int
) -> None:
    score = score_language_model(TEXTS, tiny_backbone, length=length, batch_size=batch_size)
    assert (score.targets, score.documents) == (len(STREAM) - 1, 3)
    assert score.nats == pytest.approx(nats(tiny_backbone, length), rel=1e-5)


def test_bytes_are_those_of_utf8(tiny_llama: Backbone) -> None:
    assert score_language_model(["größe w1", "é"], tiny_llama).bytes == 12


def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token(
    tiny_model: Callable[[str, int], PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model("gpt2", 0)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    score = score_language_model(["w1 w2 w3"], wrap_backbone(model, tiny_tokenizer))
    assert score.nats_per_token == pytest.approx(math.log(32), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(4 * 5 / 8, rel=1e-6)  # 4 targets, 8 bytes


def test_bits_per_byte_is_nats_over_ln2_over_bytes() -> None:
    assert LanguageModelScore(math.log(2) * 30, 7, 10, 1).bits_per_byte == pytest.approx(3.0)


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_is_refused(tiny_llama: Backbone, texts: list[str]) -> None:
    with pytest.raises(CorpusError, match=f"there must be text to score; got {len(texts)} doc"):
        score_language_model(texts, tiny_llama)


def test_a_window_of_one_token_is_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(EvaluationError, match="at least two tokens; got 1"):
        score_language_model(TEXTS, tiny_llama, length=1)


def test_a_window_beyond_the_positions_is_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(EvaluationError, match="64 positions"):
        score_language_model(["w1 " * 200], tiny_llama, length=100)


def test_a_model_without_tokenizer_is_refused(
    tiny_model: Callable[[str, int], PreTrainedModel],
) -> None:
    with pytest.raises(BackboneError, match="text needs a tokenizer"):
        score_language_model(TEXTS, wrap_backbone(tiny_model("llama", 0), None))


def test_a_tokenizer_without_end_of_text_is_refused(
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> None:
    tokenizer = word_tokenizer(["<eos>", *(f"w{i}" for i in range(1, 32))])
    tokenizer.eos_token = None
    with pytest.raises(EvaluationError, match="one end-of-text token; got None"):
        score_language_model(TEXTS, wrap_backbone(tiny_model("llama", 0), tokenizer))


def test_the_score_depends_on_the_text(tiny_llama: Backbone) -> None:
    scores = {score_language_model([text], tiny_llama).nats for text in TEXTS}
    assert len(scores) == len(np.unique(TEXTS))
