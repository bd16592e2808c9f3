"""Keys of every stage of a recipe, computed without building; moves of code must keep them.

    distill [docs-llama tau 5 greedy+drop] f18dfa1f...

The flows' own parts walk the recipe and call the stages; only what a stage would build is replaced,
by a few small files made from its key. So a key depends on the keys before it, as in a real run.
Backbones that UMIM does not ship stand in a hub's cache of their own, as a configuration and a
tokenizer, packaged ones too, so that keys do not depend on what was fetched. Facts
of a machine (its name, installed packages) are given.
`python -m tests.support.recipe_keys` writes the golden files again. Whoever commits a changed key
makes every finished stage of that name worthless: it will be built again.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from flows import parts
from tasks.plan.planner import Planner
from tasks.run.recipes import find_recipe, recipe_names
from tasks.run.stage import STAGE_SCHEMA, Artifact, StageSpec, run_stage
from tasks.stages.publish import ablation_stage, report_stage
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.recipe import Recipe
from umim_core.embedded.assets import embedded_names
from umim_core.merging.module import MergeModule
from umim_core.model_sources.model_cache import packaged_directory
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_manifest, sha256_bytes, write_manifest
from umim_core.text.sources import HubDataset, Source, TokenIds, source_digests

GOLDEN: Final = Path(__file__).parents[1] / "flows" / "keys"
COMMIT: Final = "0" * 40  # of what a recipe does not pin
TRAINED: Final = ("distill", "with-rules", "sft", "dpo")
SPLITS: Final = ("train", "valid", "test")


class KeyRecorder(Planner):
    """A plan that asks every stage for its key.

    Attributes:
        root: Receives the small files that stand for what stages build.
        lines: Name, label and key of every stage so far.
    """

    def __init__(self, recipe: Recipe, root: Path) -> None:
        super().__init__(recipe)
        self.root = root
        self.lines: list[str] = []

    def stage(
        self, function: Callable[..., Artifact], *args: object, label: str = "", setting: str = ""
    ) -> Artifact:
        artifact = function(self.root, *args)
        self.lines.append(f"{artifact.stage} [{label}] {artifact.key}")
        return artifact


def recipe_keys(name: str, root: Path) -> str:
    """Return the stages of a recipe with their keys, one a line, in the order of the flow.

    Call it within :func:`nothing_is_built`.
    """
    recipe = find_recipe(name)
    assert isinstance(recipe, Recipe)
    recipe = recipe.model_copy(update={"headline": None})  # a machine may lack its backbone
    run: Any = KeyRecorder(recipe, root)
    cells, shipped = parts.run_everything(run)
    run.stage(report_stage, recipe, cells, shipped, {})
    run.stage(ablation_stage, recipe, cells)
    return "\n".join(run.lines) + "\n"


@contextlib.contextmanager
def nothing_is_built(folder: Path) -> Iterator[None]:
    """Have stages leave small files instead of results, on a machine that is the same everywhere.

    Args:
        folder: Receives the backbones that the package does not have.
    """
    benchmark, corpus = (
        sys.modules[stage.__module__] for stage in (parts.benchmark_stage, parts.corpus_stage)
    )
    for name, revision in {model for recipe in recipe_names() for model in _models(recipe)}:
        if name not in embedded_names():
            _cache_backbone(folder, name, revision or COMMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(
            huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha=COMMIT)
        )
        patch.setattr(benchmark, "expected_place", lambda _: "a machine")
        patch.setattr(corpus, "installed_versions", lambda _: [["python", "3"]])
        for function, other in (
            (run_stage, _leave_small_files),
            (packaged_directory, lambda name, **_: _snapshot(folder, name, COMMIT)),
            (load_tokenizer, cache(load_tokenizer)),
            (tokenizer_fingerprint, cache(tokenizer_fingerprint)),
            (source_digests, _digests_of_names),
        ):
            _replace(patch, function, other)
        yield


def _models(recipe_name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the models of a recipe and their revisions."""
    recipe = find_recipe(recipe_name)
    if isinstance(recipe, Recipe):
        yield from ((cell.backbone, cell.revision) for cell in recipe.cells)
        if isinstance(recipe.corpus, GeneratedCorpus):
            yield recipe.corpus.model, recipe.corpus.revision


def _digests_of_names(source: Source) -> list[str]:
    """Stand in for `source_digests`: files that a recipe reads in place need not be here."""
    if isinstance(source, HubDataset | TokenIds):
        return source_digests(source)
    return [sha256_bytes(path.encode()) for path in source.paths]


def _replace(patch: pytest.MonkeyPatch, function: object, other: object) -> None:
    """Replace a function in every module of the project that imported it, by whatever name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("flows", "tasks", "umim_core"):
            for name, value in list(vars(module).items()):
                if value is function:
                    patch.setattr(module, name, other)


def _cache_backbone(folder: Path, name: str, commit: str) -> None:
    """Put a repository without weights into a hub's cache."""
    snapshot = _snapshot(folder, name, commit)
    repository = snapshot.parents[1]
    words = Tokenizer(WordLevel({"<eos>": 0, name: 1, "word": 2}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(snapshot)
    LlamaConfig(max_position_embeddings=4096).save_pretrained(snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def _snapshot(folder: Path, name: str, commit: str) -> Path:
    """Return where a hub's cache keeps a commit of a repository."""
    return folder / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def _leave_small_files(root: Path, spec: StageSpec, _: object) -> Artifact:
    """Stand in for `run_stage`: an artifact whose digests follow from the key."""
    out = root / spec.name / spec.key
    if not out.is_dir():
        for split in SPLITS:
            (out / split).mkdir(parents=True)
            (out / split / "data.bin").write_text(spec.key, encoding="utf-8")
        if spec.name in TRAINED:
            (out / "checkpoint").mkdir()
            _checkpoint(spec).write(out / "checkpoint")
        body = {"key": spec.key, "config": dict(spec.config)}
        write_manifest(out, kind="stage", schema=STAGE_SCHEMA, body=body)
    found = read_manifest(out, kind="stage", schema=STAGE_SCHEMA, verify=False)
    return Artifact(spec.name, spec.key, out, found["digest"], executed=False)


def _checkpoint(spec: StageSpec) -> Checkpoint:
    """Return a checkpoint that says which key it is of."""
    backbone = str(spec.config.get("backbone"))
    config = CheckpointConfig(
        hidden_size=4,
        num_heads=1,
        positions="none",
        backbone=backbone,
        backbone_fingerprint=sha256_bytes(backbone.encode()),
        tokenizer_fingerprint="any",
        training={"key": spec.key},
    )
    return Checkpoint(config, *_contents())


@cache
def _contents() -> tuple[MergeModule, RuleSet]:
    module = MergeModule(4, 1)
    with torch.no_grad():
        for weights in module.parameters():
            weights.zero_()
    return module, RuleSet.from_spans([(1, 2)], tokenizer_fingerprint="any")


def golden_path(name: str) -> Path:
    """Return the file that holds the keys of a recipe."""
    return GOLDEN / f"{name}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, nothing_is_built(Path(made) / "hub"):
        for recipe_name in recipe_names():
            golden_path(recipe_name).write_text(
                recipe_keys(recipe_name, Path(made) / "root"), encoding="utf-8"
            )
