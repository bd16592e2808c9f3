"""Questions of a generated corpus, as prompts and by split, and its files: JSON Lines in shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import TypeAdapter

from umim_core.config.corpus import QUESTION_FIELD, GeneratedCorpus, SplitFractions
from umim_core.config.model_base import SPLITS
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import described, read_json, write_json
from umim_core.store.disk import write_rows
from umim_core.text.documents import BadRows
from umim_core.text.sources import iter_documents
from umim_core.text.template_process import render_chat, template_for
from umim_core.text.token_ids import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(
    question: str, corpus: GeneratedCorpus, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the token ids of a question's prompt, with the tokens a text begins with."""
    text = corpus.template.replace(QUESTION_FIELD, question)
    if corpus.chat == "template":  # it writes the first tokens itself
        return encode(tokenizer, render_chat([{"role": "user", "content": text}], tokenizer))
    return encode(tokenizer, text, True)


@dataclass
class Selection:
    """The questions that are asked, and what became of the others."""

    texts: list[str] = field(default_factory=list)
    too_long: int = 0
    duplicates: int = 0
    bad_rows: int = 0


def select_questions(corpus: GeneratedCorpus, tokenizer: PreTrainedTokenizerBase) -> Selection:
    """Read the questions of all sources."""
    rule = "chat 'template' needs a tokenizer with a chat template"
    fits = corpus.chat == "none" or template_for(tokenizer) is not None
    remedy = "Use chat 'none', or a model that was trained for chats."
    require(fits, ConfigError, rule, corpus.model, remedy)
    selection = Selection()
    seen: set[str] = set()
    for source in corpus.questions:
        bad = BadRows()
        for text in iter_documents(source, bad):
            if text in seen:
                selection.duplicates += 1
                continue
            seen.add(text)
            tokens = len(encode(tokenizer, text))
            room = tokens <= corpus.max_question_tokens and (
                len(prompt_ids(text, corpus, tokenizer)) < corpus.max_tokens
            )
            if room and tokens:
                selection.texts.append(text)
            else:
                selection.too_long += tokens > 0
                selection.bad_rows += tokens == 0  # white space to this tokenizer
        selection.bad_rows += bad.count
    require(
        len(selection.texts) >= len(SPLITS),
        CorpusError,
        f"a generated corpus needs at least {len(SPLITS)} different questions of at most "
        f"{corpus.max_question_tokens} tokens",
        f"{len(selection.texts)}, and {selection.too_long} too long",
        "Name more questions, or raise max_question_tokens.",
    )
    return selection


def split_questions(texts: Sequence[str], fractions: SplitFractions, seed: int) -> list[str]:
    """Share questions out to the splits by the order of their hashes, whatever their own order."""
    order = sorted(
        range(len(texts)),
        key=lambda index: hashlib.sha256(f"{seed}:{texts[index]}".encode()).digest(),
    )
    held_out = {name: max(1, round(getattr(fractions, name) * len(texts))) for name in SPLITS[1:]}
    while len(texts) - sum(held_out.values()) < 1:
        held_out[max(held_out, key=lambda name: held_out[name])] -= 1
    chosen = ["train"] * len(texts)
    start = 0
    for name, count in held_out.items():
        for index in order[start : start + count]:
            chosen[index] = name
        start += count
    return chosen


@dataclass(frozen=True)
class TrajectoryRow:
    """A generated answer: one document of the corpus."""

    question: int
    trajectory: int
    ended: Literal["eos", "length"]
    tokens: int
    text: str


_QUESTIONS: Final = "questions.json"
_REMEDY: Final = "Delete the file; the same command makes it again."
_ROW: Final = TypeAdapter(TrajectoryRow)
_SELECTION: Final = TypeAdapter(Selection)


def write_selection(folder: Path, selection: Selection) -> None:
    write_json(folder / _QUESTIONS, asdict(selection))


def has_selection(folder: Path) -> bool:
    return (folder / _QUESTIONS).is_file()


def read_selection(folder: Path) -> Selection:
    path = folder / _QUESTIONS
    with described(f"{path} must hold a selection of questions", _REMEDY):
        return _SELECTION.validate_python(read_json(path))


def shard_path(folder: Path, number: int) -> Path:
    """Return where a shard lies; it is there only when it is whole."""
    return folder / "shards" / f"{number:06}.jsonl"


def write_shard(folder: Path, number: int, rows: Sequence[TrajectoryRow]) -> None:
    write_rows(shard_path(folder, number), map(asdict, rows))


def iter_rows(folder: Path) -> Iterator[TrajectoryRow]:
    """Yield the rows of all shards in order."""
    for path in sorted((folder / "shards").glob("*.jsonl")):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                with described(f"{path}:{number} must be a trajectory", _REMEDY):
                    row = _ROW.validate_json(line)
                yield row
