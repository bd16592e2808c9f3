"""Rows of text for a curve: evenly spaced over files of ids, text files or the docstring corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from benchmarks.common import Report
from benchmarks.corpus import held_out_texts, open_ids
from umim_core.evaluation.rule_damage import text_digest
from umim_core.mining.preparation import check_vocabulary
from umim_core.text.sources import source_of
from umim_core.text.tokens import first_ids, tokenize_documents

# Use of a text -> split of the docstring corpus that stands for it where no file is named.
SPLITS: Final = {"test": "test", "cut": "valid", "damage": "train"}


@dataclass(frozen=True)
class RowText:
    """Rows of one text.

    Attributes:
        name: What the results call it; no path.
        rows: Raw ids, all of one length.
    """

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
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    length: int,
    tokens: int,
    cache: Path,
) -> RowText:
    """Read a text and choose rows of it.

    Args:
        use: A key of ``SPLITS``.
        files: Flat arrays of ids (.npy), or text as ``umim mine`` takes it; none for docstrings.
        tokenizer: Of text; it must have the ids.
        rows: How many.
        length: Tokens of a row.
        tokens: Read only the first so many of each array, or of the text.
        cache: Folder of the docstring corpus.

    Raises:
        SystemExit: If the text is too short.
        CorpusError: If it cannot be read, or holds ids that the tokenizer does not have.
    """
    name = ", ".join(Path(file).name for file in files)
    if not files:
        name = f"docstrings, {SPLITS[use]}"
        documents = held_out_texts(cache, SPLITS[use])
        parts = [np.concatenate(list(tokenize_documents(documents, tokenizer)))[:tokens]]
    elif all(file.endswith(".npy") for file in files):
        parts = [open_ids(Path(file), tokens) for file in files]
    else:
        parts = [first_ids(source_of(tuple(files)), tokenizer, tokens)[0]]
    chosen = spread_rows(parts, rows, length)
    check_vocabulary(max(int(row.max()) for row in chosen), tokenizer)
    return RowText(name, chosen)


def spread_rows(
    parts: Sequence[NDArray[np.integer]], rows: int, length: int
) -> list[NDArray[np.int32]]:
    """Return rows that are evenly spaced over the whole segments of several arrays of ids.

    Raises:
        SystemExit: If there are fewer segments than rows.
    """
    places = [(part, start) for part in parts for start in range(0, len(part) - length + 1, length)]
    if rows < 1 or len(places) < rows:
        raise SystemExit(f"only {len(places)} rows of {length} tokens, {rows} are wanted")
    wanted = (places[index * len(places) // rows] for index in range(rows))
    return [np.array(part[start : start + length], dtype=np.int32) for part, start in wanted]


def check_apart(texts: Mapping[str, RowText]) -> None:
    """Refuse texts that share a row: what rules are chosen on would be measured.

    Args:
        texts: By use.

    Raises:
        SystemExit: If two of them do.
    """
    seen: dict[bytes, str] = {}
    for use, text in texts.items():
        own = {row.tobytes() for row in text.rows}
        if shared := own & seen.keys():
            raise SystemExit(
                f"the texts --{seen[shared.pop()]} and --{use} must not share a row; name other "
                "files"
            )
        seen |= dict.fromkeys(own, use)
