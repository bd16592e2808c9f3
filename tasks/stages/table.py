"""Stages ``questions``, ``mined``, ``shards``, ``text`` and ``table``: one table of the paper.

A task under a setting is scored in shards of questions, each a task of the cluster: likelihoods of
given answers, or answers that are generated. A finished shard is a file of the unfinished artifact;
a run that was killed finds it and counts it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from tasks.data.table_jobs import (
    QUESTIONS,
    SHARDS,
    ModelPlace,
    Report,
    backbone_of,
    find_questions,
    measure_text,
    read_question_set,
    read_shards,
    score_shard,
    table_row,
)
from tasks.run.stage import Artifact, Digest, Metrics, Site, stage
from tasks.stages.named import NamedCheckpoint, NamedMethod, ReadFiles
from umim_core.backbone.tokenizer_files import load_tokenizer, special_ids
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import named_config, read_config, resolve_checkpoint
from umim_core.config.rule_options import RuleOptions
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import ConfigError, CorpusError, MissingExtraError, require
from umim_core.evaluation.questions import QuestionSource, of_ruler
from umim_core.mining.counting import count_ngrams
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.store.artifacts import directory_digest, write_json
from umim_core.task_sets.generation_spec import (
    GENERATION_TASKS,
    GenerationSet,
    TaskOptions,
    make_rows,
)
from umim_core.task_sets.spec import TASKS
from umim_core.text.token_ids import encode, flat

TABLE: Final = "table.json"
_LIMITS: Final = ("questions", "new_tokens", "answers")  # fields of a recipe
_PLACED: Final = ("device", "dtype")
_OTHERS: Final = "of tasks that are not generated"


@dataclass(frozen=True)
class TableQuestions:
    """One task of a table: where its questions lie, and what decides them."""

    recipe: TableRecipe
    task: str

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of all files that decide the questions, by what they are.

        Prompts of a task that the package or lm-eval generates are measured in the backbone's
        tokens.
        """
        folders = {"hub": self.recipe.hub, "task_data": self.recipe.task_data}
        digests = {name: _content(name, Path(at)) for name, at in folders.items() if at is not None}
        if self.generated is None and not of_ruler(self.task):
            return digests
        config = named_config(self.recipe.checkpoint)
        return digests | {
            "backbone": config.backbone_fingerprint,
            "tokenizer": config.tokenizer_fingerprint,
        }

    @property
    def generated(self) -> GenerationSet | None:
        """The specification of a task that the package generates; None for another task."""
        return GENERATION_TASKS.find(self.task) if self.task in GENERATION_TASKS.names() else None

    @property
    def chosen(self) -> bool:
        """Whether likelihoods of given answers are scored, and nothing is generated."""
        return self.task in TASKS.names()

    def identity(self) -> dict[str, object]:
        """Return specification, limits, and the digests of what is read."""
        recipe, digests = self.recipe, {n: Digest(known) for n, known in self.digests.items()}
        parts: dict[str, object] = {"task": self.task, "lm_eval": _lm_eval(), **digests}
        if (own := self.generated) is not None:
            specified = {name: value for name, value in vars(own).items() if name != "make"}
            return {**parts, **own.key(), **specified, "options": _options(recipe, own)}
        if self.chosen:
            return parts if digests else {**parts, "sources": TASKS.find(self.task).sources()}
        return {**parts, "new_tokens": recipe.new_tokens, "answers": recipe.answers,
                "seed": recipe.seed}  # fmt: skip

    def source(self) -> QuestionSource:
        """Return where they lie, with paths that a worker in another folder finds."""
        recipe, own = self.recipe, self.generated
        folders = (recipe.hub, recipe.task_data)
        hub, folder = (None if at is None else str(Path(at).resolve()) for at in folders)
        return QuestionSource(
            self.task,
            hub,
            folder,
            digest=" ".join(self.digests.values()),
            checkpoint=str(resolve_checkpoint(recipe.checkpoint).resolve()),
            backbone=named_backbone(recipe),
            options=() if own is None else tuple(_options(recipe, own).items()),
            new_tokens=None if self.chosen else recipe.new_tokens,
            answers=None if self.chosen else recipe.answers,
            seed=recipe.seed,
            confirm_run_unsafe_code=recipe.confirm_run_unsafe_code,
        )


def _lm_eval() -> str:
    try:
        return version("lm_eval")
    except PackageNotFoundError as error:
        raise MissingExtraError(
            "task evaluation needs lm-eval", "lm_eval", "pip install 'umim[eval]'"
        ) from error


def named_backbone(recipe: TableRecipe) -> str | None:
    """Return the backbone that a recipe names, a file or directory by its absolute path."""
    name = recipe.backbone
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name


def _content(name: str, folder: Path) -> str:
    rule, remedy = f"{name} of a table must be a folder", "Correct it, or leave it out."
    require(folder.is_dir(), CorpusError, rule, str(folder), remedy)
    return directory_digest(folder)


def mined_task(task: str) -> GenerationSet:
    """Return a task whose prompts rules are mined from."""
    names = GENERATION_TASKS.names()
    rule = f"mine_tau is for generated tasks: {', '.join(names)}"
    remedy = "Leave it out, or mine a text: umim mine, and umim train --start CHECKPOINT."
    require(task in names, ConfigError, rule, task, remedy)
    return GENERATION_TASKS.find(task)


def check_tasks(recipe: TableRecipe) -> None:
    """Refuse data, limits, permissions and rules of prompts that no task of a table uses."""
    chosen = TASKS.names()
    for task in recipe.tasks:
        fits = recipe.task_data is None or task in chosen
        rule = f"task_data is the data of one of {', '.join(chosen)}"
        remedy = "Name a folder that stands for the hub (hub), or leave it out."
        require(fits, ConfigError, rule, f"{recipe.task_data} with {task}", remedy)
        if any(setting.mine_tau is not None for setting in recipe.settings):
            mined_task(task)
    unknown = any(task not in chosen for task in recipe.tasks)  # lm-eval knows them
    answers = "a task whose answers are generated"
    programs = bool(set(recipe.tasks) - {*chosen, *GENERATION_TASKS.names()})
    needed = {
        "questions": (bool(recipe.tasks), "a task"),
        "new_tokens": (unknown, answers),
        "answers": (unknown, answers),
        "confirm_run_unsafe_code": (programs, "a task that runs programs of a model"),
    }
    for name, (there, kind) in needed.items():
        value, rule = getattr(recipe, name), f"{name} is for tables with {kind}"
        found = f"{value!r} with {', '.join(recipe.tasks) or 'texts alone'}"
        remedy = "Leave it out, or name such a task."
        require(there or value in (None, False), ConfigError, rule, found, remedy)


def _options(recipe: TableRecipe, own: GenerationSet) -> dict[str, int]:
    """Return the options of a task (``TaskOptions``) that the recipe's limits lead to."""
    most = own.max_new_tokens
    limits = {
        "task_questions": recipe.questions,
        "task_new_tokens": None if recipe.new_tokens is None else min(recipe.new_tokens, most),
    }
    stated = {name: limit for name, limit in limits.items() if limit is not None}
    return {"task_seed": recipe.seed, **stated}


@stage(version=2)
def questions_stage(out: Path, site: Site, *, data: TableQuestions) -> Metrics:
    """Find out how many questions a task has, which, and the metrics that are means over them."""
    [(_, questions)] = site.lease.run({"": partial(find_questions, data.source())})
    write_json(out / QUESTIONS, asdict(questions))
    return {"questions": float(questions.count)}


@stage(version=2, free=dict.fromkeys(("options.task_data", "options.task_features"), _OTHERS))
def mined_stage(
    out: Path,
    _: Site,
    *,
    data: TableQuestions,
    questions: Artifact,
    checkpoint: NamedCheckpoint,
    tau: int,
    options: TaskOptions,
) -> Metrics:
    """Give the checkpoint's module rules of a generated task; the artifact holds ``checkpoint``.

    They are the n-grams that occur ``tau`` times in 100 prompts of the training split, which is
    drawn apart from the questions that are scored. A task that is not run has no checkpoint.
    Source: paper, Long-Context Evaluation (its rules are of the questions that it scores).
    """
    if not read_question_set(questions.path).count:
        return {}
    base = Checkpoint.load(checkpoint.directory)
    name, revision = backbone_of(base, checkpoint.backbone)
    tokenizer = load_tokenizer(name, revision=revision)
    rows = make_rows(mined_task(data.task), options, tokenizer, "train")
    ids = [np.asarray(encode(tokenizer, row["prompt"]), dtype=np.int64) for row in rows]
    counts = count_ngrams(*flat(ids), tau, special_ids(tokenizer))
    origin = RuleOrigin(
        options=RuleOptions(tau=tau, segment_length=None),
        tokenizer_fingerprint=base.config.tokenizer_fingerprint,
    )
    rules = RuleSet.from_counts(counts, origin)
    rule = f"mine_tau must be a count that spans of {data.task} reach"
    require(len(rules) > 0, ConfigError, rule, tau, "Lower it.")
    base.with_contents(base.module, rules).write(out / "checkpoint")
    return {"rules": float(len(rules))}


@stage(version=6, resumable=True, of_run=_PLACED, free={"setting.name": "a name"})
def shards_stage(
    out: Path,
    site: Site,
    *,
    data: TableQuestions,
    questions: Artifact,
    setting: TableSetting,
    method: NamedMethod | None,
    checkpoint: NamedCheckpoint,
    limit: int | None,
    shard: int,
    batch_size: int,
    cores: int,
) -> Metrics:
    """Score a task under a setting: ``shards/<first>-<last>.json`` with a value per question.

    A task that is not run has no shard.
    """
    question_set, source = read_question_set(questions.path), data.source()
    place = _place(checkpoint, site, batch_size)
    count, jobs = min(question_set.count, limit or question_set.count), {}
    for first in range(0, count, shard):
        last = min(first + shard, count)
        path = out / SHARDS / f"{first:07d}-{last:07d}.json"
        if not path.is_file():
            own = None if method is None else method.model
            jobs[path] = partial(
                score_shard, place, setting, source, question_set, first, last, own
            )
    with closing(site.lease.run(jobs, cores)) as scored:
        for path, scores in scored:
            write_json(path, asdict(scores))
    return read_shards(out).figures()


@stage(version=2, of_run=_PLACED, free={"text.source.paths": "only the content of files counts"})
def text_stage(
    _: Path,
    site: Site,
    *,
    text: TableText,
    files: ReadFiles,
    methods: Sequence[NamedMethod],
    checkpoint: NamedCheckpoint,
    batch_size: int,
    cores: int,
) -> Metrics:
    """Measure alignment and perplexity of one text."""
    place = _place(checkpoint, site, batch_size)
    text = text.model_copy(update={"source": text.source.absolute()})
    jobs = {"": partial(measure_text, place, text)}
    [metrics] = [measured for _, measured in site.lease.run(jobs, cores)]
    files.check_unchanged("a text changed while it was measured")
    return metrics


def table_header(recipe: TableRecipe) -> Report:
    """Return what a table says of its recipe, the checkpoint as it is named there.

    Neither where questions and texts lie nor how fast it is run is part of it.
    """
    named = {"name": recipe.name, "table": recipe.table, "checkpoint": recipe.checkpoint}
    taus = {s.name: s.mine_tau for s in recipe.settings if s.mine_tau is not None}
    return named | {
        "dtype": recipe.dtype,
        "seed": recipe.seed,
        "limits": {name: getattr(recipe, name) for name in _LIMITS},
        "settings": [setting.name for setting in recipe.settings],
        **({"mine_tau": taus} if taus else {}),
    }


@stage(version=5)
def table_stage(
    out: Path,
    _: Site,
    *,
    header: Report,
    checkpoint: NamedCheckpoint,
    questions: Mapping[str, Artifact],
    scores: Mapping[tuple[str, str], Artifact],
    texts: Mapping[str, Artifact],
) -> Metrics:
    """Put all that was measured into ``table.json``, with differences to the first setting."""
    asked = {task: read_question_set(artifact.path) for task, artifact in questions.items()}
    values = {place: read_shards(artifact.path) for place, artifact in scores.items()}
    rows: list[Report] = [
        {**asked[task].limits, "task": task, "setting": setting, "not_run": asked[task].not_run}
        if asked[task].not_run is not None
        else asked[task].limits
        | table_row(task, setting, values[task, setting], values[task, header["settings"][0]])
        for task, setting in scores
    ]
    measured = [{"text": name, **artifact.metrics} for name, artifact in texts.items()]
    backbone = read_config(checkpoint.directory).backbone
    body = {"kind": "paper_table", "backbone": backbone, "scores": rows, "texts": measured}
    write_json(out / TABLE, header | body)
    return {"rows": float(len(rows) + len(measured))}


def _place(checkpoint: NamedCheckpoint, site: Site, batch: int) -> ModelPlace:
    place, backbone = checkpoint.directory, checkpoint.backbone
    digest = directory_digest(place)
    return ModelPlace(str(place), digest, site.device, site.dtype, batch, backbone)
