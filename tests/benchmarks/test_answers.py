"""Methods of the prompt and of the cache on a question: what stays, what is saved."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.answers.__main__ import Prompt, answer_shortened
from umim_core import UMIM
from umim_core.baselines.registry import find_baseline
from umim_core.errors import ConfigError

SAVING = 0.25
TOKENS = 24


@pytest.fixture
def prompt(tiny_umim: UMIM) -> Prompt:
    """A prompt [24] whose first four and last four tokens are protected."""
    ids = np.arange(TOKENS, dtype=np.int64) % tiny_umim.backbone.vocab_size
    protected = np.zeros(TOKENS, dtype=bool)
    protected[:4] = protected[-4:] = True
    return Prompt(ids, protected, ids[-4:])


@pytest.mark.parametrize("name", ["truncation", "selective-context", "h2o", "streaming-llm"])
def test_every_method_realises_the_saving(tiny_umim: UMIM, prompt: Prompt, name: str) -> None:
    method = find_baseline(name).make(tiny_umim.backbone, tiny_umim.matcher)
    _, saving = answer_shortened(method, prompt, SAVING, tiny_umim, new_tokens=3)
    assert saving == pytest.approx(SAVING)


def test_truncation_answers_what_is_left(tiny_umim: UMIM, prompt: Prompt) -> None:
    method = find_baseline("truncation").make(tiny_umim.backbone, tiny_umim.matcher)
    text, _ = answer_shortened(method, prompt, SAVING, tiny_umim, new_tokens=3)
    left = np.concatenate([prompt.ids[:4], prompt.ids[10:]])
    assert text == tiny_umim.generate(left, max_new_tokens=3, do_sample=False, merge="none").text[0]


def test_methods_that_merge_spans_are_refused(tiny_umim: UMIM, prompt: Prompt) -> None:
    method = find_baseline("random-spans").make(tiny_umim.backbone, tiny_umim.matcher)
    with pytest.raises(ConfigError, match="drop tokens"):
        answer_shortened(method, prompt, SAVING, tiny_umim, new_tokens=3)
