"""Every recipe, run to its end: tiny random backbones of the same architectures, two steps, no GPU.

What a recipe asks of its stages stays: policies, thresholds' order, strategy, several workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.pipeline_flows import ablate
from support.shared_services import PrefectServer
from support.small_recipe import files_corpus
from support.tiny_models import random_model, tiny_config
from support.tracked_runs import runs_of
from tasks.report.comparison import COMPARISON_PARAMS
from tasks.run.recipes import find_recipe, recipe_names
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import Recipe

PHRASES = ("Return a new array of the given shape. ", "The sum of all items along an axis. ")
TEXT = "".join(PHRASES[i % 2] if i % 7 else "See also the notes below. " for i in range(1400))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}


def stand_in(name: str, base: Path) -> str:
    """Save a random model of a backbone's family, with the embedded tokenizer."""
    folder = base / name.replace("/", "--")
    if not folder.exists():
        tokenizer = load_tokenizer("umim-docs-llama")
        own = SIZES | dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
        own |= {"vocab_size": len(tokenizer), "initializer_range": 0.3}
        own["tie_word_embeddings"] = not any(part in name for part in ("DeepScaleR", "8B"))
        family = "gpt2" if "gpt2" in name else "qwen2" if "DeepScaleR" in name else "llama"
        random_model(tiny_config(family, **own)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def questions(raw: dict[str, object], base: Path) -> dict[str, object]:
    path = base / "questions.jsonl"
    lines = [json.dumps({"text": f"{PHRASES[0] * 4}Which is number {i}?"}) for i in range(80)]
    path.write_text("\n".join(lines), encoding="utf-8")
    small = {"max_tokens": 96, "max_question_tokens": 64, "batch_size": 8, "dtype": "float32"}
    asked = {"questions": [{"kind": "jsonl", "paths": [str(path)]}]}
    return raw | small | asked | {"model": stand_in(str(raw["model"]), base)}


def shrunk(recipe: Recipe, base: Path) -> dict[str, object]:
    raw = recipe.model_dump(mode="json")
    workers = min(2, recipe.cluster.workers)
    for cell in raw["cells"]:
        changes = {"backbone": stand_in(cell["backbone"], base), "revision": None, "adapt": False}
        changes["merge_depth"] = min(1, cell["merge_depth"])  # stand-ins have two layers
        if cell.get("source") == "confidence":
            changes |= {"min_probability": 3e-5, "confidence_tokens": 2000}
        cell |= changes
    generated = raw["corpus"]["kind"] == "generated"
    steps = {"max_steps": 2, "validate_every": 1, "checkpoint_every": 1, "validation_rows": 4}
    raw |= {
        "corpus": questions(raw["corpus"], base) if generated else files_corpus(base, TEXT),
        "segment_length": 32,
        "distill": raw["distill"] | steps | {"batch_size": 2 * max(1, workers)},
        "task": None,
        "adapt": None,
        "benchmark": None,
        "shipped": [],
        "evaluate": {"alignment_rows": 2, "perplexity_rows": 2, "batch_size": 2},
    }
    raw["cluster"] |= {"workers": workers, "use_gpu": False, "cpus": 2}
    for name in ("hardware", "tasks"):  # the default task has a corpus of its own
        raw.pop(name, None)
    return raw


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, using_prefect: PrefectServer) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("standins")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{base / 'mlflow.db'}")
        yield base


@pytest.mark.full
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_runs_to_its_end(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = place / "root" / name
    monkeypatch.setenv("UMIM_ROOT", str(root))
    recipe = find_recipe(name)
    assert isinstance(recipe, Recipe)
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(shrunk(recipe, place)), encoding="utf-8")
    told = ablate(str(path))
    for stage in ("distill", "evaluate"):
        assert len(list(root.glob(f"{stage}/*/manifest.json"))) == len(recipe.cells)
    files = {Path(line).name: Path(line) for line in told.splitlines() if line.startswith("/")}
    assert set(files) == {f"{name}{end}" for end in ("-kl.svg", "-top1.svg", ".json", ".md")}
    cells = json.loads(files[f"{name}.json"].read_text("utf-8"))["cells"]
    assert [cell["row"]["rule_source"] for cell in cells] == [cell.source for cell in recipe.cells]
    for cell in cells:
        assert cell["training"]["steps"] == 2
        assert sum(cell["rules"].values()) == cell["row"]["metrics"]["rules"]
    runs = runs_of(f"sqlite:///{place / 'mlflow.db'}", "comparison")
    rows = [run for run in runs if run.data.params["recipe"] == name]
    assert len(rows) == len(recipe.cells)
    assert all(set(COMPARISON_PARAMS) <= set(row.data.params) for row in rows)
    stamps = {p: p.stat().st_mtime_ns for p in root.glob("*/*/manifest.json")}
    assert ablate(str(path)) == told
    assert stamps == {p: p.stat().st_mtime_ns for p in root.glob("*/*/manifest.json")}
