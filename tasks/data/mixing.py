"""Mixture of several corpora in one file: pieces of documents in the order of a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from umim_core.store.disk import unwritable
from umim_core.store.scratch import scratch


@dataclass
class MixedSize:
    """Size of one part of a mixture: documents, the pieces they were cut into, characters."""

    documents: int = 0
    pieces: int = 0
    characters: int = 0


def mix_documents(
    parts: Mapping[str, Iterable[str]], out: Path, *, seed: int, max_characters: int
) -> dict[str, MixedSize]:
    """Write the documents of all parts in one mixed order, as JSON Lines of part and text.

    Long documents are cut first, so that no stretch of the file is of one book alone. The place of
    a piece is decided by a digest of seed, part and its number in the part: every prefix of the
    file holds the parts in about their shares, and the same documents give the same bytes. One
    document and an index of the pieces are in memory; the text waits in a file next to ``out``.

    Returns:
        Size of each part.
    """
    index: list[tuple[bytes, int, int]] = []
    sizes = {name: MixedSize() for name in parts}
    try:
        with scratch(out.parent, out.name) as unsorted, unsorted.open("w+b") as spool:
            for name, documents in parts.items():
                for document in documents:
                    sizes[name].documents += 1
                    sizes[name].characters += len(document)
                    for piece in cut_at_lines(document, max_characters):
                        row = json.dumps({"part": name, "text": piece}, ensure_ascii=False)
                        line = f"{row}\n".encode()
                        key = f"{seed} {name} {sizes[name].pieces}".encode()
                        place = hashlib.blake2b(key, digest_size=16).digest()
                        index.append((place, spool.tell(), len(line)))
                        sizes[name].pieces += 1
                        spool.write(line)
            index.sort()
            with out.open("wb") as mixed:
                for _, start, length in index:
                    spool.seek(start)
                    mixed.write(spool.read(length))
    except OSError as error:
        raise unwritable(out, sum(length for *_, length in index), error) from error
    return sizes


def cut_at_lines(document: str, max_characters: int) -> Iterator[str]:
    r"""Yield a document in pieces of at most so many characters; joined they are the document.

    A piece ends after the last line end that fits, or before the last space, or where it must::

        "one\ntwo three", 9 characters  ->  "one\n", "two three"
    """
    start = 0
    while len(document) - start > max_characters:
        limit = start + max_characters
        end = document.rfind("\n", start, limit) + 1
        if end <= start:
            end = document.rfind(" ", start + 1, limit)
        if end <= start:
            end = limit
        yield document[start:end]
        start = end
    yield document[start:]
