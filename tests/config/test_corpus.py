"""The recipes of generated and mixed corpora."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from umim_core.config.corpus import GeneratedCorpus, MixtureCorpus

RAW = {
    "kind": "generated",
    "questions": [{"kind": "dataset", "name": "a/b", "field": "problem"}],
    "model": "m",
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"questions": []}, "at least 1 item"),
        ({"top_p": 0}, "greater than 0"),
        ({"temperature": 0}, "greater than 0"),
        ({"chat": "chatml"}, "'none' or 'template'"),
        ({"max_tokens": 200}, "max_question_tokens must be below max_tokens"),
        ({"splits": {"train": 0.95, "valid": 0.05, "test": 0}}, "greater than 0"),
    ],
)
def test_what_is_out_of_bounds_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GeneratedCorpus.model_validate(RAW | changed)
    assert message in str(caught.value)


FILES = {
    "kind": "files",
    **{split: {"kind": "text", "paths": ["a.txt"]} for split in ("train", "valid", "test")},
}
DOCS = {"kind": "docstrings"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least 1 item"),
        ({"a": DOCS, "b": DOCS}, "must be one part at most"),
        ({"a b": FILES}, "should match pattern"),
        ({"a": FILES | {"train": {"kind": "ids", "path": "x.npy"}}}, "'text', 'jsonl', 'parquet'"),
    ],
)
def test_a_mixture_that_cannot_be_made_is_refused(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MixtureCorpus.model_validate({"parts": parts})
