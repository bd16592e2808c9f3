"""A table recipe on a tiny checkpoint, its questions, and its stages without a flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flows.parts import measure_table
from support.harness_files import write_data_set
from support.tiny_pipeline import Walk
from tasks.cluster.lease import ClusterLease
from umim_core.config.table_recipe import TableRecipe
from umim_core.store.disk import write_rows

QUESTIONS = 7


def write_questions(folder: Path) -> Path:
    """Write questions of words that the rules of ``tiny_checkpoint`` merge in part."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in draw.integers(1, 10, count))

    for split in ("train", "valid", "test"):
        rows = [
            {
                "context": f"w1 w2 {words(4)} w6 w7 w8 w9",
                "choices": [words(3) for _ in range(4)],
                "gold": int(draw.integers(4)),
            }
            for _ in range(QUESTIONS)
        ]
        write_rows(folder / f"{split}.jsonl", rows)
    (folder / "text.txt").write_text("\n".join(words(30) + " w3 w4 w5" for _ in range(12)), "utf-8")
    return folder


def write_hub(folder: Path) -> Path:
    """Write a folder that stands for the hub: choices and problems of the same words."""
    draw = np.random.default_rng(1)
    texts = [" ".join(f"w{n}" for n in (1, 2, *draw.integers(1, 10, 5), 3, 4, 5)) for _ in range(7)]
    problems = [{"question": text, "answer": str(draw.integers(1, 31))} for text in texts]
    chosen = [
        {"question_stem": text, "answerKey": "A",
         "choices": {"text": ["w6 w7", "w8 w9 w1"], "label": ["A", "B"]}}
        for text in texts
    ]  # fmt: skip
    sets: dict[str, tuple[str, list[dict[str, Any]], tuple[str, ...]]] = {
        "math-ai/amc23": ("default", problems, ("test",)),
        "allenai/openbookqa": ("main", chosen, ("train", "validation", "test")),
    }
    for name, (config, rows, splits) in sets.items():
        write_data_set(folder, name, config, dict.fromkeys(splits, rows))
    return folder


def generated_table(checkpoint: Path, data: Path, **changes: Any) -> TableRecipe:
    """Return a recipe of the same settings on problems with two sampled answers of six tokens."""
    options = {
        "table": "tab:Reasoning",
        "tasks": ["umim_amc23"],
        "task_data": None,
        "hub": str(data),
        "new_tokens": 6,
        "answers": 2,
    }
    return tiny_table(checkpoint, data, **options | changes)


def tiny_table(checkpoint: Path, data: Path, **changes: Any) -> TableRecipe:
    return TableRecipe.model_validate(
        {
            "name": "tiny",
            "kind": "table",
            "table": "tab:QA",
            "checkpoint": str(checkpoint),
            "settings": [{"name": "base", "merge": "none"}, {"name": "own", "merge": "all"}],
            "tasks": ["umim_docstrings"],
            "task_data": str(data),
            "shard": 2,
            "batch_size": 4,
            "cluster": {"workers": 0},
            **changes,
        }
    )


def run_table(root: Path, recipe: TableRecipe) -> Walk:
    """Measure a table; a cluster is started only for workers."""
    with ClusterLease(recipe.cluster) as lease:
        run = Walk(root, recipe, lease)
        measure_table(run)
        return run


def run_table_of(root: Path, recipe: str) -> None:
    """Measure a table in a process of its own; ``recipe`` is JSON."""
    run_table(root, TableRecipe.model_validate_json(recipe))
