"""The token ids that the benchmarks read: a file of ids, text, or the docstring corpus."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import fresh, parse
from umim_core.embedded.docstring_corpus import build_corpus
from umim_core.embedded.documents import read_documents
from umim_core.store.artifacts import sha256_file

EMBEDDED: Final = "umim-docs-llama"
CACHE: Final = Path(".umim/benchmarks")
Ids = NDArray[np.integer]
CORPUS_OPTIONS: Final[dict[str, object]] = {
    "ids": Path,
    "text": Path,
    "tokenizer": EMBEDDED,
    "cache": CACHE,
    "tokens": int,
}


def ids_file(options: argparse.Namespace) -> Path:
    """Return the file of ids, building it where text or nothing was given.

    Building needs the tokenizer, hence a process of its own: nothing of it stays in memory.
    """
    if options.ids is not None and options.text is not None:
        raise SystemExit("--ids and --text exclude each other")
    if options.ids is not None:
        return Path(options.ids).resolve()
    folder = Path(options.cache).resolve()
    if options.text is None:
        target = folder / "docstrings.npy"
    else:
        target = folder / f"text-{sha256_file(options.text)[:16]}.npy"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = None if options.text is None else Path(options.text).resolve()
        fresh("corpus", target=target, text=text, tokenizer=options.tokenizer)
    return target


def open_ids(path: Path, tokens: int | None = None) -> Ids:
    """Map the first ``tokens`` ids of a file into memory."""
    ids = np.load(path, mmap_mode="r", allow_pickle=False)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SystemExit(f"{path.name} must hold one flat array of integers")
    return ids[:tokens]


def build_ids(target: Path, text: Path | None, tokenizer_name: str) -> int:
    """Tokenize one text, or the training split of the docstring corpus, into a file of ids.

    Returns:
        Number of ids.
    """
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.text.tokens import tokenize_documents

    tokenizer = load_tokenizer(tokenizer_name)
    with tempfile.TemporaryDirectory(prefix="umim-corpus-") as folder:
        if text is None:
            build_corpus(Path(folder), workers=2)
            documents = [document.text for document in read_documents(Path(folder) / "train.jsonl")]
        else:
            documents = [text.read_text(encoding="utf-8")]
    ids = np.concatenate(list(tokenize_documents(documents, tokenizer))).astype(np.int32)
    partial = target.with_suffix(".partial.npy")
    np.save(partial, ids, allow_pickle=False)
    partial.replace(target)
    return len(ids)


def held_out_texts(cache: Path = CACHE, split: str = "test") -> list[str]:
    """Return the docstrings that neither the shipped rules nor the shipped modules have seen."""
    folder = cache.resolve() / "docstrings"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="docstrings-", dir=folder.parent) as partial:
            build_corpus(Path(partial) / "built", workers=2)
            (Path(partial) / "built").replace(folder)
    return [document.text for document in read_documents(folder / f"{split}.jsonl")]


def main() -> None:
    """Build a file of ids; the other benchmarks start this."""
    required = {"target": {"type": Path, "required": True}}
    options = parse(__doc__, required | {"text": Path, "tokenizer": EMBEDDED})
    print(build_ids(options.target, options.text, options.tokenizer))


if __name__ == "__main__":
    main()
