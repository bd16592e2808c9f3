"""Data sets as lm-eval reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from umim_core.store.disk import write_rows


def write_data_set(
    hub: Path, name: str, config: str, splits: Mapping[str, Sequence[Mapping[str, object]]]
) -> None:
    """Write a data set as the hub has it: a card that names the files, and a file per split."""
    folder = hub / name
    folder.mkdir(parents=True, exist_ok=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, "utf-8")
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)
