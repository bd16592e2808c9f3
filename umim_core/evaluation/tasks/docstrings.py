"""Data of the embedded multiple-choice task for its lm-eval file.

lm-eval imports this file by its path; it must not depend on lm-eval itself.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from datasets import Dataset, DatasetDict

from umim_core.adaptation.choices import read_questions
from umim_core.embedded.docstring_corpus import TRAINING_PACKAGES, build_corpus, installed_versions
from umim_core.embedded.docstring_task import build_task
from umim_core.errors import CorpusError
from umim_core.evaluation.console import one_line_errors
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.store.locking import directory_lock
from umim_core.store.publication import publish_directory

TASK: Final = "umim_docstrings"
DATA_VARIABLE: Final = "UMIM_TASK_DATA"
CACHE_VARIABLE: Final = "XDG_CACHE_HOME"
SPLITS: Final = ("train", "valid", "test")


@one_line_errors()
def load_splits(task_data: str | None = None, **metadata: object) -> DatasetDict:
    """Load the splits for lm-eval.

    Args:
        task_data: Folder with ``train.jsonl``, ``valid.jsonl`` and ``test.jsonl``; by default what
            ``UMIM_TASK_DATA`` names, else a folder built once from the installed packages.
        **metadata: Ignored; lm-eval passes the task's metadata and the model's arguments.

    Returns:
        Splits ``train``, ``valid`` and ``test`` with the columns context, choices and gold.

    Raises:
        CorpusError: If a file is missing or malformed.
    """
    folder = Path(task_data or os.environ.get(DATA_VARIABLE) or built_task())
    if not folder.is_dir():
        raise CorpusError(
            f"{DATA_VARIABLE} must name a folder with train, valid and test.jsonl",
            str(folder),
            "Correct or unset it.",
        )
    return DatasetDict(
        {
            split: Dataset.from_list([vars(q) for q in read_questions(folder / f"{split}.jsonl")])
            for split in SPLITS
        }
    )


def built_task() -> Path:
    """Return the folder of the task made from the installed packages, building it if need be.

    It lies under ``$XDG_CACHE_HOME/umim`` (``~/.cache/umim``), one folder per set of versions of
    the packages it is made from; a second process waits for the first.
    """
    versions = canonical_json(installed_versions(TRAINING_PACKAGES))
    base = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "umim"
    final = base / f"{TASK}-{sha256_bytes(versions.encode())[:16]}"

    def build(directory: Path) -> None:
        corpus = directory / "corpus"
        build_corpus(corpus, out_of_domain=())
        build_task(corpus, directory)
        shutil.rmtree(corpus)  # 40 MB that only the questions were made from

    with directory_lock(final.with_name(f"{final.name}-build"), wait_seconds=None):
        if not final.is_dir():
            publish_directory(final, build)
    return final
