"""The stage contract (reliability 39 and 40 at the level of a stage), and keys of stages.

Keys are tried over every call that the flows make: all that a stage is given counts, once. What is
missing in a key shows as an old result for a new question; what is there without need, as work done
twice. What is free stands at the stage with its reason.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import tasks.stages
from flows import parts
from flows.planner import Planner
from support.tiny_models import tiny_model, word_tokenizer
from support.tiny_table import write_questions
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import site_of
from tasks.run.stage import (
    Artifact,
    Digest,
    Identified,
    Metrics,
    Site,
    Stage,
    StageCall,
    StageSpec,
    key_parts,
    run_stage,
    stage,
    verifying_once,
)
from tasks.stages.named import (
    NamedBackbone,
    NamedBase,
    NamedCheckpoint,
    NamedRules,
    NamedTask,
    NamedTokenizer,
    ReadFiles,
)
from tasks.stages.publish import ablation_stage, report_stage
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import DEFAULT_TASK, Recipe, RunRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ArtifactError
from umim_core.rules.ruleset import RuleSet
from umim_core.text.sources import source_of

SPEC = StageSpec("count", 1, {"tau": 5, "excluded": [1, 2]}, {"tokens": "a" * 64})


def build(out: Path, text: str = "x", loss: float = 0.25) -> dict[str, float]:
    (out / "data.txt").write_text(text)
    return {"size": 1.0, "loss": loss}


def never(out: Path) -> dict[str, float]:
    pytest.fail("the stage was built again")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_stage_is_built_once_and_then_found_and_refused_once_altered(tmp_path: Path) -> None:
    first, second = (run_stage(tmp_path, SPEC, make) for make in (build, never))
    assert (first.executed, second.executed) == (True, False)
    assert replace(first, executed=False) == second
    assert second.path == tmp_path.resolve() / "count" / SPEC.key
    assert names(tmp_path / "count") == {SPEC.key}
    assert names(second.path) == {"data.txt", "manifest.json"}
    (second.path / "data.txt").write_text("y")
    with pytest.raises(ArtifactError, match="must"):
        run_stage(tmp_path, SPEC, build)


def test_files_and_numbers_count_in_what_depends_on_a_stage_and_times_do_not(
    tmp_path: Path,
) -> None:
    one, two = (run_stage(tmp_path / name, SPEC, build) for name in ("a", "b"))
    assert one.digest == two.digest == one.identity()
    for name, change in (("c", {"text": "y"}), ("d", {"loss": 0.5})):
        assert run_stage(tmp_path / name, SPEC, partial(build, **change)).digest != one.digest


def test_whatever_a_stage_is_made_from_is_in_its_key() -> None:
    config, inputs = {"tau": 6, "excluded": [1, 2]}, {"tokens": "b" * 64}
    changes = ({"name": "recount"}, {"version": 2}, {"config": config}, {"inputs": inputs})
    assert len({SPEC.key, *(replace(SPEC, **change).key for change in changes)}) == 5


def test_within_a_run_files_are_read_once_and_looked_for_at_every_use(tmp_path: Path) -> None:
    file = run_stage(tmp_path, SPEC, build).path / "data.txt"
    with verifying_once():
        first = run_stage(tmp_path, SPEC, never)
        file.write_text("y")  # neither size nor manifest: only reading the file shows it
        assert run_stage(tmp_path, SPEC, never) == first
        file.unlink()
        with pytest.raises(ArtifactError, match="must"):
            run_stage(tmp_path, SPEC, never)
    file.write_text("y")
    with verifying_once():
        for _ in range(2):
            with pytest.raises(ArtifactError, match="must"):
                run_stage(tmp_path, SPEC, never)


def test_a_directory_without_a_manifest_does_not_exist_and_is_set_aside(tmp_path: Path) -> None:
    first = run_stage(tmp_path, SPEC, build)
    (first.path / "manifest.json").unlink()
    again = run_stage(tmp_path, SPEC, build)
    assert again.executed and again.digest == first.digest
    (torn,) = first.path.parent.glob("*.torn-*")
    assert names(torn) == {"data.txt"}


TRAIN = {"max_steps": 4, "batch_size": 4}
MODEL = "umim-docs-llama"


class Calls(Planner):
    """A plan that keeps its calls; every stage hands back the same real, small artifact."""

    def __init__(self, recipe: RunRecipe, made: Artifact) -> None:
        super().__init__(recipe)
        self.made, self.calls = made, list[StageCall]()

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        self.calls.append(call)
        return self.made


@pytest.fixture(scope="module")
def calls(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path
) -> list[tuple[StageCall, Site]]:
    """Every call of recipes of every kind and corpus."""
    folder = tmp_path_factory.mktemp("calls")
    data = write_questions(folder / "questions")
    RuleSet.from_spans([(1, 2)]).save(folder / "rules")
    text = {"kind": "text", "paths": [str(data / "text.txt")]}
    split = dict.fromkeys(("train", "valid", "test"), text)
    own = {"kind": "files", **split}
    cells = [
        {"backbone": MODEL, "adapt": True, "tau": 5},
        {"backbone": MODEL, "source": "confidence"},
        {"backbone": MODEL, "rules": str(folder / "rules")},
    ]
    adapt = {"sft": TRAIN, "dpo": TRAIN}
    usual = {"name": "all", "distill": TRAIN, "mining": {"protect": ["digits"]}, "cells": cells[1:]}
    mixture = {"kind": "mixture", "parts": {"a": own, "b": {"kind": "docstrings"}}}
    whole = {"adapt": adapt, "benchmark": {}, "tasks": [DEFAULT_TASK], "shipped": [MODEL]}
    recipes: list[RunRecipe] = [
        Recipe.model_validate(usual | more)
        for more in (
            {"corpus": mixture, "cells": cells, **whole},
            {"corpus": {"kind": "files", **split, "out_of_domain": {"other": text}}},
            {"corpus": {"kind": "generated", "questions": [text], "model": MODEL}},
        )
    ]
    settings = [
        {"name": "base", "merge": "none"},
        {"name": "own", "merge": "prompt", "protect": ["digits"], "mine_tau": 5},
        {"name": "cut", "merge": "prompt", "method": "truncation"},
    ]
    table = {"name": "t", "kind": "table", "table": "tab:QA", "checkpoint": str(tiny_checkpoint)}
    texts = {"t": {"source": text, "methods": ["truncation"]}}
    recipes += [
        TableRecipe.model_validate(
            table | {"settings": settings, "tasks": ["umim_ruler_1k"], "texts": texts}
        ),
        TableRecipe.model_validate(
            table | {"settings": settings[:1], "tasks": [DEFAULT_TASK], "task_data": str(data)}
        ),
    ]
    files = {name: str(data / f"{name}.jsonl") for name in split}
    curves = {"name": "c", "kind": "adaptation", "checkpoints": [MODEL], "taus": [5], **adapt}
    recipes += [
        AdaptationRecipe.model_validate(curves | {"questions": questions} | more)
        for questions, more in (
            ({"kind": "docstrings"}, {}),
            ({"kind": "files", **files}, {"controls": ["lora"], "sizes": dict.fromkeys(split, 2)}),
        )
    ]

    def build(out: Path) -> Metrics:
        shutil.copytree(tiny_checkpoint, out / "checkpoint")
        for name in split:
            (out / name).mkdir()
            for file in (f"{name}/data.bin", f"{name}.jsonl"):
                (out / file).write_text(name, encoding="utf-8")
        return {}

    task = {"task": NamedTask(DEFAULT_TASK).identity()}
    made = run_stage(folder, StageSpec("made", 1, task, {}), build)
    found: list[tuple[StageCall, Site]] = []
    for recipe in recipes:
        run: Any = Calls(recipe, made)
        if isinstance(recipe, Recipe):
            results = parts.run_everything(run)
            run.stage(report_stage(recipe=recipe, results=results))
            run.stage(ablation_stage(recipe=recipe, results=results))
        elif isinstance(recipe, TableRecipe):
            parts.measure_table(run)
        else:
            parts.measure_adaptation(run)
        site = site_of(folder, recipe, ClusterLease(recipe.cluster))
        found += [(call, site) for call in run.calls]
    return found


def all_stages() -> dict[str, Stage[...]]:
    modules = [
        importlib.import_module(f"tasks.stages.{module.name}")
        for module in pkgutil.iter_modules(tasks.stages.__path__)
    ]
    of_modules = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in of_modules if isinstance(value, Stage)}


def plain(value: object) -> object:
    """Return what a stage is given as mappings, lists, digests and values."""
    while isinstance(value, Identified):
        value = value.identity()
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {k if isinstance(k, str) else " | ".join(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def variations(value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, copy) with one value below it changed, added to or left out."""
    if isinstance(value, dict):
        yield "", {**value, "one more": 1}
        for name, inner in value.items():
            for path, changed in variations(inner):
                yield f".{name}{path}", {**value, name: changed}
    elif isinstance(value, list):
        yield "", [*value, "one more"]
        for number, inner in enumerate(value):
            for path, changed in variations(inner):
                yield f".{number}{path}", [*value[:number], changed, *value[number + 1 :]]
    elif isinstance(value, Digest):
        yield "", Digest(f"another {value}")
    else:
        yield (
            "",
            f"another {value}" if isinstance(value, str) else 1 if value is None else value + 1,
        )


OTHER_PLACES: dict[str, dict[str, object]] = {
    "device": {"use_gpu": True}, "dtype": {}, "workers": {"workers": 7},
    "strategy": {"strategy": "deepspeed"}, "nothing that counts": {"cpus": 3, "max_restarts": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(all_stages()))
def test_everything_a_stage_is_given_counts_but_what_is_free(
    name: str, calls: list[tuple[StageCall, Site]]
) -> None:
    own = [(call, site) for call, site in calls if call.stage.name == name]
    assert own, "no flow calls it"
    kept, free, seen = set[str](), own[0][0].stage.free, list[object]()
    assert all(free.values()), "a reason is given"
    for call, site in own:
        spec, given = call.spec(site), plain(call.arguments)
        assert isinstance(given, dict)
        if given in seen:
            continue
        seen.append(given)
        call = replace(call, arguments=given)  # the same key, without reading every model again
        assert spec == call.spec(site)
        assert spec.key == call.spec(replace(site, root=site.root / "elsewhere")).key
        before = key_parts(given, free)
        assert {**spec.config, **before[0]} == spec.config and spec.inputs == before[1]
        for path, changed in variations(given):
            assert isinstance(changed, dict)
            above = {name for name in free if f"{path}.".startswith(f".{name}.")}
            kept |= above
            assert (key_parts(changed, free) == before) == bool(above), path
        for fact, change in OTHER_PLACES.items():
            dtype, config = site.dtype, site.lease.config
            if fact == "dtype":
                dtype = "bfloat16"
            other = Site(site.root, ClusterLease(config.model_copy(update=change)), dtype)
            if "machine" not in call.stage.of_run:
                assert (call.spec(other).key != spec.key) == (fact in call.stage.of_run), fact
    assert kept == set(free), "nothing of this name is given"


def identities(place: Path) -> dict[str, object]:
    """What stands in keys for the things of each kind in a folder, as they are now."""
    found: dict[str, Identified] = {
        "tokenizer": NamedTokenizer(str(place)),
        "backbone": NamedBackbone(str(place)),
        "checkpoint": NamedCheckpoint(place / "checkpoint"),
        "base": NamedBase(place / "checkpoint"),
        "rules": NamedRules(str(place / "rules")),
        "files": ReadFiles({"train": source_of((str(place / "text.txt"),))}),
    }
    return {kind: named.identity() for kind, named in found.items()}


@pytest.fixture
def place(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A backbone, a text, a checkpoint and rules on disk, to be changed."""
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer(["<eos>", *(f"w{i}" for i in range(1, 31)), "<end>"]).save_pretrained(tmp_path)
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    RuleSet.from_spans([(1, 2)]).save(tmp_path / "rules")
    (tmp_path / "text.txt").write_text("w1 w2", encoding="utf-8")
    return tmp_path


def retold(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def another_weight(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + b"\x7f")


def other_rules(folder: Path) -> None:
    shutil.rmtree(folder / "rules")
    RuleSet.from_spans([(1, 3)]).save(folder / "rules")


CHANGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "the vocabulary": (
        lambda at: retold(
            at / "tokenizer.json",
            lambda t: t["model"]["vocab"].update(v9=t["model"]["vocab"].pop("w9")),
        ),
        {"tokenizer", "backbone"},
    ),
    "the special tokens": (
        lambda at: retold(at / "tokenizer_config.json", lambda t: t.update(eos_token="w9")),
        {"tokenizer", "backbone"},
    ),
    "the weights": (another_weight, {"backbone"}),
    "the model's settings": (
        lambda at: retold(at / "config.json", lambda config: config.update(rms_norm_eps=1e-5)),
        {"backbone"},
    ),
    "the checkpoint": (
        lambda at: retold(
            at / "checkpoint" / "config.json", lambda config: config["training"].update(seed=99)
        ),
        {"checkpoint"},
    ),
    "the rules": (other_rules, {"rules"}),
    "the text": (lambda at: (at / "text.txt").write_text("w1 w1", encoding="utf-8"), {"files"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_name_stands_in_keys_for_what_it_means_now(place: Path, what: str) -> None:
    before = identities(place)
    change, changes = CHANGES[what]
    change(place)
    now = identities(place)
    assert {kind for kind in before if now[kind] != before[kind]} == changes


@stage(version=1, free={"limit": "a cost"})
def sums_stage(out: Path, _: Site, *, tokens: int, limit: int = 3, base: int = 0) -> Metrics:
    """Stand for a stage with defaults."""
    return {"sum": float(tokens + base)}


def test_defaults_count_as_if_they_were_given_and_what_has_no_value_is_refused(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, ClusterLease(Recipe.model_fields["cluster"].default))
    plain_call = sums_stage(tokens=1).spec(site)
    assert plain_call.config == {"tokens": 1, "base": 0} and plain_call.name == "sums"
    assert sums_stage(tokens=1, limit=9, base=0).spec(site).key == plain_call.key
    assert sums_stage(tokens=1, base=1).spec(site).key != plain_call.key
    with pytest.raises(TypeError):
        sums_stage(1)  # by keyword alone
    for value in (tmp_path, object()):
        with pytest.raises(TypeError, match="cannot hold"):
            sums_stage(tokens=value).spec(site)  # type: ignore[arg-type]  # what is refused
