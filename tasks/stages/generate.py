"""Stage ``generate``: trajectories that a language model samples for questions, shard by shard.

A shard is a range of questions and one file. It is written whole or not at all, with seeds of its
own, so a run that dies goes on with the next shard and ends with the bytes of an undisturbed one,
on the CPU with as many threads: a Ray worker has one, this process as many as torch takes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import Cluster
from tasks.cluster.worker_errors import as_data, cluster_error, from_data
from tasks.run.checks import check_device
from tasks.run.site import Site
from tasks.run.stage import Digest, Metrics, stage
from tasks.stages.named import NamedBackbone, ReadFiles
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import UmimError
from umim_core.progress import followed, leave_note
from umim_core.store.artifacts import canonical_json, sha256_bytes, sha256_file
from umim_core.store.publication import STATE
from umim_core.synthetic_corpora.questions import (
    Prompter,
    Selection,
    TrajectoryRow,
    has_selection,
    iter_rows,
    read_selection,
    select_questions,
    shard_path,
    write_selection,
    write_shard,
)
from umim_core.synthetic_corpora.trajectories import sample_trajectories

logger = logging.getLogger("umim.generate")


@dataclass(frozen=True)
class Generation:
    """A corpus to generate, with its questions and the model that answers them."""

    corpus: GeneratedCorpus

    @cached_property
    def questions(self) -> ReadFiles:
        return ReadFiles({str(n): source for n, source in enumerate(self.corpus.questions)})

    def identity(self) -> dict[str, object]:
        backbone = NamedBackbone(self.corpus.model, self.corpus.revision)
        tokenizer = backbone.tokenizer.loaded
        # Which tokens end a text, where the model's identity does not cover it.
        ends = Path(resolve_backbone(self.corpus.model)) / "generation_config.json"
        chat = str(tokenizer.chat_template) if self.corpus.chat == "template" else ""
        return {
            "config": self.corpus,
            "questions": self.questions,
            "model": backbone,
            "ends": Digest(sha256_file(ends) if ends.is_file() else "none"),
            "chat_template": sha256_bytes(chat.encode()) if chat else None,
            "end_of_text": tokenizer.eos_token_id,
        }


@stage(
    version=2,
    resumable=True,
    of_run=("device",),
    free=dict.fromkeys(
        [f"generation.config.{name}" for name in ("splits", "out_of_domain", "train_tokens")],
        "decides what becomes of the text, not the text",
    ),
)
def generate_stage(out: Path, site: Site, *, generation: Generation) -> Metrics:
    """Sample trajectories for the questions of a corpus.

    The artifact holds ``questions.json`` and ``shards/*.jsonl``.
    """
    corpus = generation.corpus
    if not has_selection(out):
        tokenizer = load_tokenizer(corpus.model, revision=corpus.revision)
        selected = select_questions(corpus, Prompter(tokenizer, corpus))
        generation.questions.check_unchanged("questions changed while they were selected")
        write_selection(out, selected)
    selection, state = read_selection(out), out / STATE
    shards = range(-(-len(selection.texts) // corpus.shard_questions))
    missing = [number for number in shards if not shard_path(out, number).is_file()]
    job = GenerateJob(corpus, str(out), site.device)
    with followed(state):
        done = len(shards) - len(missing)
        for number in _run(job, missing, site.lease):
            done += 1
            leave_note(state, done, len(shards), "sampling")
            logger.info("generate: shard %d, %d of %d", number, done, len(shards))
    return _metrics(out, selection)


@dataclass(frozen=True)
class GenerateJob:
    """One generation run as plain data for every worker."""

    corpus: GeneratedCorpus
    folder: str
    device: Literal["cpu", "cuda"]


class Sampler:
    """Make shards with one loaded model."""

    def __init__(self, job: GenerateJob) -> None:
        corpus = job.corpus
        check_device(job.device)
        self._backbone = load_backbone(
            corpus.model, revision=corpus.revision, dtype=corpus.dtype, device=job.device
        )
        self._prompter = Prompter(self._backbone.require_tokenizer(), corpus)
        self._questions = read_selection(Path(job.folder)).texts
        self._folder, self._corpus = Path(job.folder), corpus

    def make(self, number: int) -> None:
        """Sample and write one shard."""
        corpus = self._corpus
        first = number * corpus.shard_questions
        texts = self._questions[first : first + corpus.shard_questions]
        prompts = [self._prompter.prompt(text) for text in texts]
        sampled = sample_trajectories(self._backbone, prompts, corpus, corpus.seed, first=first)
        rows = [
            TrajectoryRow(
                question=first + index,
                trajectory=trajectory,
                ended=answer.ended,
                tokens=len(prompts[index]) + len(answer.ids),
                text=self._backbone.decode([*prompts[index], *answer.ids]),
            )
            for index, answers in enumerate(sampled)
            for trajectory, answer in enumerate(answers)
        ]
        write_shard(self._folder, number, rows)


class RemoteSampler:
    """Make shards in a Ray actor; the model is loaded with the first one.

    A typed error is handed back as data, for Ray would wrap it and add advice of its own.
    """

    def __init__(self, job: GenerateJob) -> None:
        self._job = job
        self._sampler: Sampler | None = None

    def __call__(self, row: dict[str, int]) -> dict[str, object]:
        """Make the shard that a row names."""
        number = int(row["shard"])
        try:
            self._sampler = self._sampler or Sampler(self._job)
            self._sampler.make(number)
        except UmimError as error:
            return {"shard": number, "failed": canonical_json(as_data(error))}
        return {"shard": number, "failed": ""}


def _run(job: GenerateJob, shards: Sequence[int], lease: ClusterLease) -> Iterator[int]:
    """Make shards and yield their numbers as they are finished."""
    if not shards:
        return
    if lease.config.workers:
        with lease.room(lease.config.workers) as cluster:
            yield from _run_on_ray(job, shards, lease.config, cluster)
        return
    sampler = Sampler(job)
    for number in shards:
        sampler.make(number)
        yield number


def _run_on_ray(
    job: GenerateJob, shards: Sequence[int], config: ClusterConfig, cluster: Cluster
) -> Iterator[int]:
    import pyarrow as pa
    import ray
    from ray.exceptions import RayError

    from tasks.data.counting_tables import TASK_RESTARTS, prepare_ray_data

    prepare_ray_data()
    # Ray Data warns of actors that ask for cores and a GPU at once.
    needs: dict[str, Any] = {"num_gpus": 1} if config.use_gpu else {"num_cpus": 1}
    if place := cluster.beside_driver():
        needs["resources"] = place
    plan = ray.data.from_blocks([pa.table({"shard": [number]}) for number in shards]).map(
        RemoteSampler,
        fn_constructor_args=(job,),
        compute=ray.data.ActorPoolStrategy(
            size=min(config.workers, len(shards)), max_tasks_in_flight_per_actor=1
        ),
        max_restarts=TASK_RESTARTS,
        max_task_retries=TASK_RESTARTS,
        **needs,
    )
    try:
        for row in plan.iter_rows():
            if row["failed"]:
                raise from_data(json.loads(row["failed"]))
            yield row["shard"]
    except RayError as error:
        rule, again = (
            "the workers that generate must stay alive",
            "Run the same command again; finished shards are kept.",
        )
        raise cluster_error(rule, error, again) from error


def _metrics(out: Path, selection: Selection) -> Metrics:
    ended: Counter[str] = Counter()
    tokens = 0
    for row in iter_rows(out):
        ended[row.ended] += 1
        tokens += row.tokens
    return {
        "questions": float(len(selection.texts)),
        "questions_too_long": float(selection.too_long),
        "questions_duplicate": float(selection.duplicates),
        "questions_bad_rows": float(selection.bad_rows),
        "trajectories": float(ended.total()),
        "ended_by_eos": float(ended["eos"]),
        "ended_by_length": float(ended["length"]),
        "tokens": float(tokens),
    }
