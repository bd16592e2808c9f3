"""Data sets as lm-eval reads them, and what ``--output_path DIR --log_samples`` leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umim_core.store.disk import write_rows

DATE = "2026-03-04T05-06-07.000008"
PROMPT = "Question: was it née?\nAnswer:"
CONTENT: dict[str, Any] = {
    "results": {
        "tiny": {
            "alias": "tiny",
            "sample_len": 2,
            "acc,none": 0.5,
            "acc_stderr,none": 0.25,
            "exact_match,strict-match": 0.0,
            "pass@1,none": 1.0,
            "acc_difference_stderr,none": "N/A",
        }
    },
    "config": {
        "model": "umim",
        "model_args": "checkpoint=umim-docs-llama,token=s3cret",
        "limit": 2.0,
        "umim": {"module_digest": "m" * 64, "rules_digest": "r" * 64, "merge": "prompt"},
    },
    "n-shot": {"tiny": 0},
    "configs": {"tiny": {"dataset_path": "none"}},
    "date": 1_772_600_767.5,
    "total_evaluation_time_seconds": "1.5",
}
SAMPLES = [
    {
        "doc_id": number,
        "doc": {"question": "was it née?"},
        "target": "1",
        "arguments": {
            "gen_args_0": {"arg_0": PROMPT, "arg_1": " yes"},
            "gen_args_1": {"arg_0": PROMPT, "arg_1": " no"},
        },
        "filtered_resps": [["-1.5", "False"]],
        "acc": float(number),
    }
    for number in range(2)
]


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


def write_results(folder: Path, content: dict[str, Any] = CONTENT) -> Path:
    """Write one call's files into a folder, and return the folder."""
    inner = folder / "model"
    inner.mkdir(parents=True, exist_ok=True)
    (inner / f"results_{DATE}.json").write_text(json.dumps(content), encoding="utf-8")
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in SAMPLES)
    (inner / f"samples_tiny_{DATE}.jsonl").write_text(lines, encoding="utf-8")
    return folder
