from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.tiny_language_models import CONFIG, SHAPES
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from tasks.stages.backbone import backbone_stage, tokenizer_stage
from tasks.stages.corpus import corpus_stage, tokenize_stage, tokens
from tasks.training.language_model import (
    LanguageModelJob,
    train_language_model,
)
from umim_core.backbone.backbone import load_backbone
from umim_core.config.backbone_recipe import BackboneRecipe
from umim_core.embedded.docs_tokenizer import END_OF_TEXT_ID

CHECKOUT = Path(__file__).resolve().parents[3]


def documents(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "größe", "map", "reduce", "the", "of", "a"]
    return [" ".join(rng.choice(words, 40)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> BackboneRecipe:
    folder = tmp_path_factory.mktemp("text")
    corpus: dict[str, object] = {"kind": "files"}
    for seed, (split, count) in enumerate({"train": 60, "valid": 9, "test": 7}.items()):
        rows = [json.dumps({"text": text}) for text in documents(count, seed)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
        corpus[split] = {"kind": "jsonl", "paths": [str(folder / f"{split}.jsonl")]}
    return BackboneRecipe.model_validate(
        {
            "kind": "backbone",
            "name": "tiny",
            "corpus": corpus,
            "vocab_size": 300,
            "architecture": SHAPES["llama"],
            "train": CONFIG.model_dump() | {"max_steps": 20, "sequence_length": 32},
            "cluster": {"workers": 0},
        }
    )


def build(root: Path, recipe: BackboneRecipe) -> dict[str, Artifact]:
    corpus = corpus_stage(root, recipe.corpus)
    tokenizer = tokenizer_stage(root, corpus, recipe)
    directory = str(tokenizer.path / "tokenizer")
    with ClusterLease(recipe.cluster) as lease:
        tokenized = tokenize_stage(
            root, lease, corpus, recipe.corpus, directory, separator=END_OF_TEXT_ID
        )
        trained = backbone_stage(root, lease, recipe, corpus, tokenizer, tokenized)
    return {"tokenizer": tokenizer, "tokenize": tokenized, "backbone": trained}


@pytest.fixture(scope="module")
def stages(
    recipe: BackboneRecipe, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Artifact]]:
    root = tmp_path_factory.mktemp("root")
    return root, build(root, recipe)


def test_end_of_text_follows_every_document(stages: tuple[Path, dict[str, Artifact]]) -> None:
    artifacts = stages[1]
    backbone = load_backbone(str(artifacts["backbone"].path / "backbone"))
    expected: list[int] = []
    for text in documents(9, 1):
        expected += [*backbone.encode(text), END_OF_TEXT_ID]
    assert backbone.require_tokenizer().eos_token_id == END_OF_TEXT_ID
    assert tokens(artifacts["tokenize"], "valid")[:].tolist() == expected


def test_the_artifact_is_a_transformers_directory_in_bfloat16(
    stages: tuple[Path, dict[str, Artifact]],
) -> None:
    directory = stages[1]["backbone"].path / "backbone"
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        kinds = {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.max_position_embeddings == 64
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_state_is_not_published(stages: tuple[Path, dict[str, Artifact]]) -> None:
    published = {path.name for path in stages[1]["backbone"].path.iterdir()}
    assert published == {"backbone", "curve.jsonl", "summary.json", "manifest.json"}


@torch.no_grad()
def nats(directory: Path, texts: list[str], window: int) -> tuple[float, int]:
    """The slow way: one forward per window through transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    backbone = load_backbone(str(directory))
    ids = [END_OF_TEXT_ID]
    for text in texts:
        ids += [*backbone.encode(text), END_OF_TEXT_ID]
    total = 0.0
    for start in range(0, len(ids) - 1, window - 1):
        row = torch.tensor(ids[start : start + window])
        logits = model(input_ids=row[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits.double(), row[1:], reduction="sum"))
    return total, len(ids) - 1


@pytest.mark.parametrize(("split", "count", "seed"), [("valid", 9, 1), ("test", 7, 2)])
def test_the_card_tells_what_was_measured(
    stages: tuple[Path, dict[str, Artifact]], split: str, count: int, seed: int
) -> None:
    artifact = stages[1]["backbone"]
    card = (artifact.path / "backbone" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in card.splitlines() if line.startswith(f"| {split} |")]
    cells = [cell.strip().replace(",", "") for cell in row.strip("|").split("|")]
    texts = documents(count, seed)
    total, targets = nats(artifact.path / "backbone", texts, 32)
    size = sum(len(text.encode()) for text in texts)
    assert [int(cell) for cell in cells[1:4]] == [count, targets, size]
    expected = [total / targets, math.exp(total / targets), total / math.log(2) / size]
    assert [float(cell) for cell in cells[4:]] == pytest.approx(expected, abs=0.051)
    assert float(cells[4]) == pytest.approx(expected[0], abs=6e-4)
    assert float(cells[6]) == pytest.approx(expected[2], abs=6e-4)
    assert artifact.metrics[f"{split}_bits_per_byte"] == pytest.approx(expected[2], rel=1e-5)


def test_the_card_tells_steps_tokens_command_and_licence(
    stages: tuple[Path, dict[str, Artifact]],
) -> None:
    artifact = stages[1]["backbone"]
    card = (artifact.path / "backbone" / "README.md").read_text(encoding="utf-8")
    steps = int(artifact.metrics["steps"])
    assert f"{steps} steps of 4 rows of 32 tokens: {steps * 4 * 32:,} tokens" in card
    assert "license: apache-2.0" in card
    assert "python -m flows run tiny" in card
    weights = load_file(artifact.path / "backbone" / "model.safetensors")
    assert f"Parameters: {sum(value.numel() for value in weights.values()):,}," in card


def test_a_finished_backbone_is_found(
    recipe: BackboneRecipe, stages: tuple[Path, dict[str, Artifact]]
) -> None:
    again = build(stages[0], recipe)
    assert not any(artifact.executed for artifact in again.values())


def test_the_same_recipe_gives_the_same_bytes(
    recipe: BackboneRecipe, stages: tuple[Path, dict[str, Artifact]], tmp_path: Path
) -> None:
    again = build(tmp_path, recipe)
    assert again["backbone"].executed
    assert again["backbone"].digest == stages[1]["backbone"].digest


def test_a_separator_leaves_the_key_of_mining_alone(
    recipe: BackboneRecipe, stages: tuple[Path, dict[str, Artifact]]
) -> None:
    config = stages[1]["tokenize"].manifest()["config"]
    assert isinstance(config, dict)
    assert set(config) == {"tokenizer", "train_tokens", "separator"}


RANK = """
import json, sys
import torch.distributed as dist
from tasks.training.language_model import train_language_model
rank, world, meeting, jobs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=world)
for job in json.loads(jobs):
    train_language_model(job)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_two_ranks_train_like_one(stages: tuple[Path, dict[str, Artifact]], tmp_path: Path) -> None:
    artifacts = stages[1]
    jobs = {
        name: LanguageModelJob(
            architecture=SHAPES["llama"],
            tokenizer=str(artifacts["tokenizer"].path / "tokenizer"),
            train=str(artifacts["tokenize"].path / "train"),
            valid=str(artifacts["tokenize"].path / "valid"),
            seed=0,
            config=CONFIG.model_dump(),
            strategy="ddp" if name == "one" else name,
            use_gpu=False,
            out=str(tmp_path / name),
        )
        for name in ("one", "ddp", "deepspeed")
    }
    for job in jobs.values():
        Path(job.out).mkdir()
    train_language_model(asdict(jobs["one"]))
    text = json.dumps([asdict(jobs["ddp"]), asdict(jobs["deepspeed"])])
    environment = os.environ | {
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(tmp_path / "meeting"), text],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)

    def weights(name: str) -> dict[str, Tensor]:
        state = load_file(tmp_path / name / "state" / "step-00000006" / "rank-0.safetensors")
        return {key: value for key, value in state.items() if key.startswith("module.")}

    for name in ("ddp", "deepspeed"):
        for key, value in weights("one").items():
            torch.testing.assert_close(weights(name)[key], value, atol=2e-4, rtol=1e-3, msg=key)
