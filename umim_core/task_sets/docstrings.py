"""The embedded multiple-choice task: which summary line belongs to this docstring?

    Return a view of the array ...      <- summary line: the right choice
                                           (three more come from other docstrings of the split)
    Parameters                          <- body: the context, at most 900 characters;
    ----------                             the object's own name is blanked where it would tell
    axis : int

Questions are made of documents of their split alone, and drawn by hash of the document ids: the
same corpus gives the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umim_core.config.model_base import Split
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.embedded.docstring_corpus import (
    TRAINING_PACKAGES,
    Document,
    ObjectKind,
    build_corpus,
    installed_versions,
)
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.disk import write_rows
from umim_core.task_sets.spec import QuestionForm, TaskSet, add_task
from umim_core.text.documents import read_objects

DEFAULT_SIZES: Final[Mapping[Split, int]] = {"train": 8000, "valid": 1000, "test": 1000}
MIN_SUMMARY_CHARS: Final = 15
MAX_SUMMARY_CHARS: Final = 160
MIN_CONTEXT_CHARS: Final = 200
MAX_CONTEXT_CHARS: Final = 900  # at most 470 tokens of the embedded tokenizer, choice included
BLANK: Final = "___"

_CHOICES: Final = 4
_MAX_DRAWS: Final = 200  # per question; a split with four distinct summaries needs far fewer
_WORD: Final = re.compile(r"[a-z]+")
# Signatures, titles underlined in the same paragraph, doctests, tables, licences, open sentences.
_NOT_A_SUMMARY: Final = re.compile(r"->|===|---|~~~|>>>|\+\+\+|\||copyright|licen[sc]e|:$", re.I)
_NAME_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class _Candidate:
    """A document that can become a question, and whose summary can distract in others."""

    id: str
    module: str
    kind: ObjectKind
    summary: str
    context: str
    words: frozenset[str]


def write_docstring_questions(
    out: Path, sizes: Mapping[Split, int] | None = None, corpus: Path | None = None
) -> None:
    """Write the questions of a docstring corpus, or of one made from the installed packages.

    Rows are ``{"id", "context", "choices", "gold"}``: four distinct choices, `gold` the index of
    the right one. Each of the four positions is right equally often (to within one question).
    """
    sizes = DEFAULT_SIZES if sizes is None else sizes
    rule, remedy = "task sizes must be at least 1", "Leave a split out to skip it."
    require(min(sizes.values(), default=1) >= 1, ConfigError, rule, dict(sizes), remedy)
    out.mkdir(parents=True, exist_ok=True)
    folder = corpus or out / "corpus"
    if corpus is None:
        build_corpus(folder, out_of_domain=())
    for split, size in sizes.items():
        reasons: Counter[str] = Counter()
        candidates = list(_candidates(read_documents(folder / f"{split}.jsonl"), reasons))
        candidates.sort(key=lambda c: (_hash(c.id), c.id))
        rows = list(_questions(candidates, size, reasons))
        rule = f"the {split} split must hold documents with a summary and a body"
        remedy = "Build the corpus from more packages."
        require(bool(rows), CorpusError, rule, dict(reasons), remedy)
        write_rows(out / f"{split}.jsonl", rows)
    if corpus is None:
        shutil.rmtree(folder)  # 40 MB that only the questions were made from


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of one file of a docstring corpus."""
    for _, fields in read_objects(path):
        yield Document(**fields)


def _candidates(documents: Iterable[Document], dropped: Counter[str]) -> Iterator[_Candidate]:
    """Yield the documents with a usable summary and body; count the others by reason."""
    taken: set[str] = set()
    for document in documents:
        first, _, body = document.text.partition("\n\n")
        summary = " ".join(first.split())
        words = frozenset(_WORD.findall(summary.lower()))
        context = _context(body, document.name, words)
        folded = " ".join(context.split()).lower()
        if not document.has_summary:
            dropped["summary repeats another document"] += 1
        elif not MIN_SUMMARY_CHARS <= len(summary) <= MAX_SUMMARY_CHARS:
            dropped["summary too short or too long"] += 1
        elif len(words) < 3 or _NOT_A_SUMMARY.search(summary):
            dropped["summary is no sentence"] += 1
        elif len(context) < MIN_CONTEXT_CHARS:
            dropped["body too short"] += 1
        elif summary.lower().rstrip(".") in folded:
            dropped["body repeats the summary"] += 1
        elif summary.lower() in taken:
            dropped["summary taken by another question"] += 1
        else:
            taken.add(summary.lower())
            module = document.id.partition("::")[0]
            yield _Candidate(document.id, module, document.kind, summary, context, words)


def _context(body: str, name: str, summary_words: frozenset[str]) -> str:
    """Return the body, blanked and cut.

    The name is blanked where a part of it is a word of the summary: ``median`` would give away
    "Compute the median", while ``f`` or ``forward`` mostly tell nothing.
    """
    parts = {part.lower() for part in _NAME_PART.findall(name)}
    if any(len(p) > 2 and w.startswith(p[:5]) for p in parts for w in summary_words):
        body = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", BLANK, body)
    body = body.strip()
    if len(body) <= MAX_CONTEXT_CHARS:
        return body
    head = body[: MAX_CONTEXT_CHARS + 1]
    # A paragraph border in the second half of what fits, else a line, else a word.
    for border in ("\n\n", "\n", " "):
        cut = head.rfind(border)
        if cut >= MAX_CONTEXT_CHARS // 2:
            return head[:cut].rstrip()
    return head[:MAX_CONTEXT_CHARS]


def _questions(
    candidates: Sequence[_Candidate], size: int, dropped: Counter[str]
) -> Iterator[dict[str, object]]:
    """Yield up to `size` rows, in the order of the candidates."""
    by_kind: dict[ObjectKind, list[_Candidate]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate.kind, []).append(candidate)
    count = 0
    for candidate in candidates:
        if count == size:
            return
        distractors = _distractors(candidate, by_kind[candidate.kind])
        if distractors is None:
            dropped["too few distinct distractors"] += 1
            continue
        gold = count % _CHOICES
        choices = [*distractors[:gold], candidate.summary, *distractors[gold:]]
        yield {"id": candidate.id, "context": candidate.context, "choices": choices, "gold": gold}
        count += 1


def _distractors(question: _Candidate, pool: Sequence[_Candidate]) -> list[str] | None:
    """Draw summaries of the same kind of object that a reader can tell from the right one.

    Summaries from the same module, and those that share more than half of their words with the
    right one or with each other, could be right as well; they are passed over.
    """
    chosen: list[_Candidate] = []
    for draw in range(_MAX_DRAWS):
        other = pool[_hash(f"{question.id} {draw}") % len(pool)]
        if other.module == question.module:
            continue
        shared = [(other.words & c.words, other.words | c.words) for c in (question, *chosen)]
        if any(2 * len(common) > len(either) for common, either in shared):
            continue
        chosen.append(other)
        if len(chosen) == _CHOICES - 1:
            return [c.summary for c in chosen]
    return None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


add_task(
    TaskSet(
        name=DEFAULT_TASK,
        write=write_docstring_questions,
        chance=1 / _CHOICES,
        form=QuestionForm("{context}\n\nSummary:", part="context"),
        corpus="docstrings",
        sources=lambda: installed_versions(TRAINING_PACKAGES),
    )
)
