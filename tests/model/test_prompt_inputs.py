"""Prompts as ids, tensors and what tokenizers return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from umim_core import UMIM
from umim_core.errors import GenerationError

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


def test_padded_ids_come_with_their_mask(tiny_umim: UMIM) -> None:
    expected = tiny_umim.generate(TEXTS, max_new_tokens=4)
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
        (torch.tensor([1.5]), {}, "1-D array of at least one token id"),
        (torch.tensor([99]), {}, "ids must lie between"),
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
