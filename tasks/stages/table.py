"""Stages ``questions``, ``mined``, ``shards``, ``text`` and ``table``: one table of the paper.

A task under a setting is scored in shards of questions, each a task of the cluster: likelihoods of
given answers, or answers that are generated. A finished shard is a file of the unfinished artifact;
a run that was killed finds it and counts it once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import run_on_workers
from tasks.data.table_jobs import (
    QUESTIONS,
    SHARDS,
    ModelPlace,
    Report,
    find_questions,
    measure_text,
    read_questions,
    read_shards,
    score_shard,
    table_row,
)
from tasks.data.table_sources import (
    data_digests,
    mined_task,
    named_backbone,
    question_source,
    source_facts,
)
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import changed_files
from umim_core.adaptation.choices import ragged
from umim_core.addresses import is_address
from umim_core.backbone.fingerprint import special_ids
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.registry import own_model
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.rule_options import RuleOptions
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import ConfigError, MissingExtraError
from umim_core.evaluation.questions import QuestionSet, ShardScores
from umim_core.mining.counting import count_ngrams
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest, write_json
from umim_core.task_sets.generation_spec import TaskOptions, make_rows
from umim_core.text.sources import HubDataset
from umim_core.text.token_ids import encode

TABLE: Final = "table.json"
_LIMITS: Final = ("questions", "new_tokens", "answers")  # fields of a recipe


def questions_stage(root: Path, lease: ClusterLease, recipe: TableRecipe, task: str) -> Artifact:
    """Find out how many questions a task has, which, and the metrics that are means over them."""
    inputs = data_digests(recipe, task)
    source = question_source(recipe, task, inputs)
    facts = source_facts(recipe, task, inputs)
    config: dict[str, object] = {"task": task, "lm_eval": _lm_eval(), **facts}

    def build(out: Path) -> Metrics:
        def keep(_: str, questions: QuestionSet) -> None:
            write_json(out / QUESTIONS, asdict(questions))

        run_on_workers(lease, {task: partial(find_questions, source)}, keep)
        return {"questions": float(read_questions(out).count)}

    return run_stage(root, StageSpec("questions", 1, config, inputs), build)


def mined_stage(
    root: Path, questions: Artifact, recipe: TableRecipe, task: str, tau: int
) -> Artifact:
    """Give the checkpoint's module rules of a generated task; the artifact holds ``checkpoint``.

    They are the n-grams that occur ``tau`` times in 100 prompts of the training split, which is
    drawn apart from the questions that are scored. A task that is not run has no checkpoint.
    Source: paper, Long-Context Evaluation (its rules are of the questions that it scores).
    """
    place, own = _place(recipe), mined_task(task)
    options = TaskOptions(recipe.seed, task_new_tokens=recipe.new_tokens)
    config = {"tau": tau, "options": asdict(options)} | source_facts(recipe, task, {})
    inputs = {"questions": questions.digest, "checkpoint": place.digest}

    def build(out: Path) -> Metrics:
        if not read_questions(questions.path).count:
            return {}
        base = Checkpoint.load(Path(place.checkpoint))
        name, revision = place.backbone_of(base)
        tokenizer = load_tokenizer(name, revision=revision)
        prompts = [row["prompt"] for row in make_rows(own, options, tokenizer, "train")]
        ids = [np.asarray(encode(tokenizer, prompt), dtype=np.int64) for prompt in prompts]
        counts = count_ngrams(*ragged(ids), tau, special_ids(tokenizer))
        origin = RuleOrigin(
            options=RuleOptions(tau=tau, segment_length=None),
            tokenizer_fingerprint=base.config.tokenizer_fingerprint,
        )
        rules = RuleSet.from_counts(counts, origin)
        if not len(rules):
            raise ConfigError(
                f"mine_tau must be a count that spans of {task} reach", tau, "Lower it."
            )
        (out / "checkpoint").mkdir()
        base.with_contents(base.module, rules).write(out / "checkpoint")
        return {"rules": float(len(rules))}

    return run_stage(root, StageSpec("mined", 1, config, inputs), build)


def shards_stage(
    root: Path,
    lease: ClusterLease,
    questions: Artifact,
    recipe: TableRecipe,
    setting: TableSetting,
    mined: Artifact | None = None,
) -> Artifact:
    """Score a task under a setting: ``shards/<first>-<last>.json`` with a value per question.

    ``mined`` is the artifact of :func:`mined_stage`, if rules are mined for the setting. A task
    that is not run has no shard.
    """
    place = _place(recipe, mined)
    base = setting.merge == "none"
    source = read_config(Path(place.checkpoint)).backbone_fingerprint if base else place.digest
    of = questions.manifest()
    task = of["config"]["task"]
    # How questions were made is in their digest; how they are answered is not.
    answering = {name: of["config"][name] for name in ("generation",) if name in of["config"]}
    own = None if setting.method is None else own_model(setting.method)
    spec = StageSpec(
        "shards",
        5,
        {
            **setting.model_dump(exclude={"name"}),
            "task": task,  # several tasks ask the same questions
            "lm_eval": of["config"]["lm_eval"],
            "questions": recipe.questions,
            "shard": recipe.shard,
            "batch_size": recipe.batch_size,
            "cores": recipe.cores,
            "device": place.device,
            "dtype": recipe.dtype,
            **answering,
            **({} if own is None else {"method_model": own}),
        },
        {"questions": questions.digest, "model": source},
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        question_set = read_questions(questions.path)
        data = question_source(recipe, task, of["inputs"])
        count = min(question_set.count, recipe.questions or question_set.count)
        jobs = {}
        for first in range(0, count, recipe.shard):
            last = min(first + recipe.shard, count)
            path = out / SHARDS / f"{first:07d}-{last:07d}.json"
            if not path.is_file():
                asked = (data, question_set, first, last, own)
                jobs[path] = partial(score_shard, place, setting, *asked)
        run_on_workers(lease, jobs, _keep_shard, recipe.cores)
        return read_shards(out).figures()

    return run_stage(root, spec, build)


def _lm_eval() -> str:
    try:
        return version("lm_eval")
    except PackageNotFoundError as error:
        raise MissingExtraError(
            "task evaluation needs lm-eval", "lm_eval", "pip install 'umim[eval]'"
        ) from error


def _keep_shard(path: Path, scores: ShardScores) -> None:
    write_json(path, asdict(scores))


def text_stage(root: Path, lease: ClusterLease, recipe: TableRecipe, text: TableText) -> Artifact:
    """Measure alignment and perplexity of one text."""
    place = _place(recipe)
    owned = {name: own for name in text.methods if (own := own_model(name)) is not None}
    digests = text.source.digests()
    spec = StageSpec(
        "text",
        1,
        {
            **text.model_dump(exclude={"source"}),
            "source": text.source.model_dump(mode="json", exclude={"paths"}),
            "batch_size": recipe.batch_size,
            "cores": recipe.cores,
            "device": place.device,
            "dtype": recipe.dtype,
            **({"method_models": owned} if owned else {}),
        },
        {
            "checkpoint": place.digest,
            **{f"text {n}": digest for n, digest in enumerate(digests)},
        },
    )

    def build(_: Path) -> Metrics:
        metrics: Metrics = {}
        jobs = {"text": partial(measure_text, place, _in_place(text))}
        run_on_workers(lease, jobs, lambda _, scores: metrics.update(scores), recipe.cores)
        if text.source.digests() != digests:
            raise changed_files("a text changed while it was measured")
        return metrics

    return run_stage(root, spec, build)


def _in_place(text: TableText) -> TableText:
    """Return a text whose files are named from the root; a worker stands in another folder."""
    if isinstance(text.source, HubDataset):
        return text
    places = tuple(
        path if is_address(path) else os.path.abspath(path) for path in text.source.paths
    )
    source = text.source.model_copy(update={"paths": places})
    return text.model_copy(update={"source": source})


def table_stage(
    root: Path,
    recipe: TableRecipe,
    questions: Mapping[str, Artifact],
    scores: Mapping[tuple[str, str], Artifact],
    texts: Mapping[str, Artifact],
) -> Artifact:
    """Put all that was measured into ``table.json``, with differences to the first setting."""
    inputs = {f"questions of {task}": artifact.digest for task, artifact in questions.items()}
    inputs |= {
        f"{task} | {setting}": artifact.digest for (task, setting), artifact in scores.items()
    }
    inputs |= {f"text {name}": artifact.key for name, artifact in texts.items()}  # it holds no file
    settings = [setting.name for setting in recipe.settings]
    spec = StageSpec(
        "table",
        3,
        {
            "name": recipe.name,
            "table": recipe.table,
            "checkpoint": str(recipe.checkpoint),
            "backbone": read_config(resolve_checkpoint(recipe.checkpoint)).backbone,
            "dtype": recipe.dtype,
            "seed": recipe.seed,
            "limits": {name: getattr(recipe, name) for name in _LIMITS},
            "settings": settings,
        },
        inputs,
    )

    def build(out: Path) -> Metrics:
        asked = {task: read_questions(artifact.path) for task, artifact in questions.items()}
        values = {place: read_shards(artifact.path) for place, artifact in scores.items()}
        rows: list[Report] = [
            {**asked[task].limits, "task": task, "setting": setting, "not_run": asked[task].not_run}
            if asked[task].not_run is not None
            else asked[task].limits
            | table_row(task, setting, values[task, setting], values[task, settings[0]])
            for task, setting in scores
        ]
        measured = [{"text": name, **artifact.metrics} for name, artifact in texts.items()]
        taus = {s.name: s.mine_tau for s in recipe.settings if s.mine_tau is not None}
        body = {"kind": "paper_table", **spec.config, "scores": rows, "texts": measured}
        body |= {"mine_tau": taus} if taus else {}
        write_json(out / TABLE, body)
        return {"rows": float(len(rows) + len(measured))}

    return run_stage(root, spec, build)


def _place(recipe: TableRecipe, mined: Artifact | None = None) -> ModelPlace:
    given = None if mined is None else mined.path / "checkpoint"
    own = recipe.checkpoint if given is None or not given.is_dir() else given
    directory = resolve_checkpoint(own).resolve()
    return ModelPlace(
        str(directory),
        directory_digest(directory),
        recipe.cluster.device,
        recipe.dtype,
        recipe.batch_size,
        named_backbone(recipe),
    )
