"""Prompts as ids, tensors and what tokenizers return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from umim_core import UMIM
from umim_core.errors import CorpusError, EvaluationError, GenerationError
from umim_core.task_sets.spec import Question
from umim_core.text.token_ids import encode

TEXTS = ["w1 w2 w9 w3 w4", "w5 w6 w7"]
IDS = [[1, 2, 9, 3, 4], [5, 6, 7]]
PADDED = [[1, 2, 9, 3, 4], [0, 0, 5, 6, 7]]
MASK = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS[0],
        tuple(IDS[0]),
        np.array(IDS[0], dtype=np.uint16),
        torch.tensor(IDS[0]),
        torch.tensor(IDS[:1]),
        IDS[:1],
        [np.array(IDS[0])],
        [torch.tensor(IDS[0])],
        {"input_ids": IDS[0]},
    ],
    ids=repr,
)
def test_ids_are_a_prompt(tiny_umim: UMIM, prompt: Any) -> None:
    expected = tiny_umim.generate(TEXTS[0], max_new_tokens=4)
    assert tiny_umim.generate(prompt, max_new_tokens=4) == expected
    assert tiny_umim.generate(input_ids=prompt, max_new_tokens=4) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_tokenizer_returns_is_a_batch(
    tiny_umim: UMIM, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    expected = tiny_umim.generate(TEXTS, max_new_tokens=4)
    tokenizer = tiny_umim.backbone.require_tokenizer()
    monkeypatch.setattr(tokenizer, "padding_side", side)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert encoded["attention_mask"].min() == 0
    assert tiny_umim.generate(encoded, max_new_tokens=4) == expected
    assert tiny_umim.generate(**encoded, max_new_tokens=4) == expected
    assert tiny_umim.generate(tokenizer(TEXTS), max_new_tokens=4) == expected  # lists, no padding
    for form in (torch.tensor, np.array, list):
        output = tiny_umim.generate(form(PADDED), attention_mask=form(MASK), max_new_tokens=4)
        assert output == expected


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ({"role": "user", "content": "w1"}, {}, "content"),
        ([{"input_ids": [1]}], {}, "a list of mappings"),
        (torch.tensor(3), {}, "shape"),
        (5, {}, "int"),
        (bytearray(b"w1"), {}, "got bytearray"),
        ([b"w1"], {}, "a prompt of type bytes"),
        ([[1, 2]], {"attention_mask": 1}, "a mask of type int"),
        ([[{"role": "user", "content": "w1"}, None]], {}, "chat"),
        (torch.ones(2, dtype=torch.bfloat16), {}, "BFloat16"),
        (torch.tensor([1, 2]).to_sparse(), {}, "Sparse"),
        ([{"role": "user", "content": "w1"}], {}, "with a chat template, .*; got one without"),
        (torch.tensor(PADDED), {"attention_mask": torch.ones(2, 4)}, "shape of the ids"),
        ({"input_ids": IDS[0], "attention_mask": [1] * 5}, {"attention_mask": [1] * 5}, "twice"),
        (TEXTS[0], {"input_ids": IDS}, "prompts must be given once"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(
    tiny_umim: UMIM, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        tiny_umim.generate(prompts, **options)


def test_padding_without_a_mask_is_warned_of(
    tiny_umim: UMIM, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([[1, 2, 9, 3], [0, 0, 4, 5]])  # <pad> is id 0
    tiny_umim.generate(ids, max_new_tokens=1)
    assert "rows [1] begin or end with the padding token 0" in caplog.text
    caplog.clear()
    tiny_umim.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=1)
    tiny_umim.generate({"input_ids": ids, "attention_mask": (ids != 0).long()}, max_new_tokens=1)
    tiny_umim.generate(ids[1], max_new_tokens=1)
    tiny_umim.generate([np.array([1, 2]), np.array([3])], max_new_tokens=1)
    assert caplog.messages == []


LONE = "the \ud83d shape"
ENTRANCES = {
    "generate": lambda umim: umim.generate(LONE),
    "a batch": lambda umim: umim.generate(["w1", LONE]),
    "stream": lambda umim: list(umim.stream(LONE)),
    "prefix": lambda umim: umim.prefix(LONE),
    "compress": lambda umim: umim.compress(LONE),
    "perplexity": lambda umim: umim.perplexity(["w1 w2", LONE]),
    "contexts": lambda umim: umim.score([LONE], [["w1"]]),
    "continuations": lambda umim: umim.score(["w1"], [[LONE]]),
    "stop strings": lambda umim: umim.generate("w1", stop_strings=["w1", LONE]),
    "encode": lambda umim: encode(umim.backbone.require_tokenizer(), LONE),
    "question": lambda _: Question(LONE, ("a", "b"), 0),
    "choice": lambda _: Question("a", ("a", LONE), 0),
}


@pytest.mark.parametrize("text", [None, 5, b"w1", ["w1"]])
def test_what_is_no_text_is_refused(tiny_umim: UMIM, text: Any) -> None:
    with pytest.raises(CorpusError, match="a text must be a string; got"):
        tiny_umim.compress(text)
    with pytest.raises(EvaluationError):
        tiny_umim.perplexity(text)
    for contexts, endings in (([text], [["w1"]]), (["w1"], [[text]])):
        with pytest.raises((CorpusError, EvaluationError)):
            tiny_umim.score(contexts, endings)


@pytest.mark.parametrize("name", ENTRANCES)
def test_lone_surrogates_are_refused_at_every_entrance(tiny_umim: UMIM, name: str) -> None:
    with pytest.raises((GenerationError, CorpusError), match="lone surrogates"):
        ENTRANCES[name](tiny_umim)
