"""Rows of text: evenly spaced over files of ids, text files or the docstring corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from benchmarks.common import Report
from benchmarks.corpus import held_out_texts, open_ids
from umim_core.evaluation.rule_damage import text_digest
from umim_core.mining.preparation import check_vocabulary
from umim_core.text.sources import source_of
from umim_core.text.tokens import first_ids, tokenize_documents


@dataclass(frozen=True)
class RowText:
    """Rows of one text."""

    name: str
    rows: list[NDArray[np.int32]]

    def facts(self) -> Report:
        """Return name, size and SHA-256 of the ids."""
        tokens = sum(map(len, self.rows))
        return {
            "name": self.name,
            "rows": len(self.rows),
            "tokens": tokens,
            "digest": text_digest(self.rows),
        }


def read_rows(
    use: str,
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    length: int,
    tokens: int,
    cache: Path,
    others: Iterable[RowText] = (),
) -> RowText:
    """Read a text and choose rows of it.

    Args:
        use: ``train`` or ``test``, also the split of docstrings where no file is named.
        sources: Flat arrays of ids (.npy), or text as ``umim mine`` takes it, with ``NAME=`` before
            a file to call it so; none for docstrings.
        tokenizer: Of text; it must have the ids.
        rows: How many.
        length: Tokens of a row.
        tokens: Read only the first so many of each array, or of the text.
        cache: Folder of the docstring corpus.
        others: Texts whose rows are left out.

    Raises:
        SystemExit: If the text is too short.
        CorpusError: If it cannot be read, or holds ids that the tokenizer does not have.
    """
    pairs = [source.rpartition("=") for source in sources]
    name = ", ".join(dict.fromkeys(given or Path(file).name for given, _, file in pairs))
    files = [file for _, _, file in pairs]
    if not files:
        name = f"docstrings, {use}"
        documents = held_out_texts(cache, use)
        parts = [np.concatenate(list(tokenize_documents(documents, tokenizer)))[:tokens]]
    elif all(file.endswith(".npy") for file in files):
        parts = [open_ids(Path(file), tokens) for file in files]
    else:
        parts = [first_ids(source_of(tuple(files)), tokenizer, tokens)[0]]
    chosen = spread_rows(parts, rows, length, [row for text in others for row in text.rows])
    check_vocabulary(max(int(row.max()) for row in chosen), tokenizer)
    return RowText(name, chosen)


def spread_rows(
    parts: Sequence[NDArray[np.integer]],
    rows: int,
    length: int,
    taken: Iterable[NDArray[np.int32]] = (),
) -> list[NDArray[np.int32]]:
    """Return rows that are evenly spaced over the whole segments of several arrays of ids.

    Raises:
        SystemExit: If there are fewer segments than rows.
    """
    used = {row.tobytes() for row in taken}
    places = [
        (part, start)
        for part in parts
        for start in range(0, len(part) - length + 1, length)
        if not used or part[start : start + length].astype(np.int32).tobytes() not in used
    ]
    if rows < 1 or len(places) < rows:
        raise SystemExit(f"only {len(places)} rows of {length} tokens, {rows} are wanted")
    wanted = (places[index * len(places) // rows] for index in range(rows))
    return [np.array(part[start : start + length], dtype=np.int32) for part, start in wanted]
