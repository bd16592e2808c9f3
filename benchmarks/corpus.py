"""The text that the benchmarks read: a file of token ids, or the docstring corpus."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import fresh, parse
from umim_core.embedded.docstring_corpus import build_corpus, read_documents

EMBEDDED: Final = "umim-docs-llama"
CACHE: Final = Path(".umim/benchmarks")
_IDS: Final = "docstrings.npy"
Ids = NDArray[np.integer]
CORPUS_OPTIONS: Final[dict[str, object]] = {"ids": Path, "cache": CACHE, "tokens": int}


def ids_file(options: argparse.Namespace) -> Path:
    """Return the file of ids; where none was given, that of the docstring corpus, built once.

    Building needs the tokenizer, hence a process of its own: nothing of it stays in memory.
    """
    if options.ids is not None:
        return Path(options.ids).resolve()
    folder = Path(options.cache).resolve()
    if not (folder / _IDS).exists():
        fresh("corpus", cache=folder)
    return folder / _IDS


def open_ids(path: Path, tokens: int | None = None) -> Ids:
    """Map the first ``tokens`` ids of a file into memory."""
    ids = np.load(path, mmap_mode="r", allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SystemExit(f"{path.name} must hold one flat array of integers")
    return ids[:tokens]


def docstrings(split: str, cache: Path = CACHE) -> list[str]:
    """Return the docstring corpus; neither shipped rules nor modules have seen its test split."""
    folder = cache.resolve() / "docstrings"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="docstrings-", dir=folder.parent) as partial:
            build_corpus(Path(partial) / "built", workers=2)
            (Path(partial) / "built").replace(folder)
    return [document.text for document in read_documents(folder / f"{split}.jsonl")]


def main() -> None:
    """Build the file of ids; the other benchmarks start this."""
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.text.tokens import tokenize_parts

    folder = parse(__doc__, {"cache": CACHE}).cache
    documents = docstrings("train", folder)
    pieces = tokenize_parts(((document, True) for document in documents), load_tokenizer(EMBEDDED))
    ids = np.concatenate([ids for ids, _ in pieces])
    partial = folder / "docstrings.partial.npy"
    np.save(partial, ids.astype(np.int32), allow_pickle=False)
    partial.replace(folder / _IDS)
    print(len(ids))


if __name__ == "__main__":
    main()
