"""Lone surrogates, half of a character, are one typed error wherever text comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from umim_core import UMIM
from umim_core.errors import CorpusError
from umim_core.task_sets.spec import Question
from umim_core.text.sources import JsonLines, iter_documents
from umim_core.text.token_ids import encode

LONE = "the \ud83d shape"


def row(umim: UMIM) -> object:
    Path("a.jsonl").write_text(json.dumps({"text": LONE}))
    return list(iter_documents(JsonLines(paths=("a.jsonl",))))


ENTRANCES: dict[str, Callable[[UMIM], object]] = {
    "generate": lambda umim: umim.generate(LONE, max_new_tokens=2),
    "stream": lambda umim: list(umim.stream(LONE, max_new_tokens=2)),
    "compress": lambda umim: umim.compress(LONE),
    "perplexity": lambda umim: umim.perplexity([LONE]),
    "score": lambda umim: umim.score(["the"], [[LONE]]),
    "score context": lambda umim: umim.score([LONE], [["the"]]),
    "prefix": lambda umim: umim.prefix(LONE),
    "encode": lambda umim: encode(umim.backbone.require_tokenizer(), LONE),
    "row": row,
    "question": lambda umim: Question(LONE, ("a", "b"), 0),
    "choice": lambda umim: Question("a", ("a", LONE), 0),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_lone_surrogate_is_one_typed_error(
    tiny_umim: UMIM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entrance: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=r"text must not hold lone surrogates; .*ud83d"):
        ENTRANCES[entrance](tiny_umim)
