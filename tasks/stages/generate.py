"""Stage ``generate``: trajectories that a language model samples for questions, shard by shard.

A shard is a range of questions and one file. It is written whole or not at all, with seeds of its
own and on one thread, so a run that dies goes on with the next shard and ends with the bytes of an
undisturbed one, however many workers share the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import torch

from tasks.run.checks import check_device
from tasks.run.stage import Digest, Metrics, Site, stage
from tasks.stages.named import NamedBackbone, ReadFiles, without_places
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.config.corpus import GeneratedCorpus
from umim_core.progress import followed, leave_note
from umim_core.store.artifacts import sha256_bytes, sha256_file
from umim_core.store.publication import STATE
from umim_core.synthetic_corpora.questions import (
    Selection,
    TrajectoryRow,
    has_selection,
    iter_rows,
    prompt_ids,
    read_selection,
    select_questions,
    shard_path,
    write_selection,
    write_shard,
)
from umim_core.synthetic_corpora.trajectories import sample_trajectories

_THREADS: Final = 1  # with more, last bits differ, and with them what is sampled


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
            "config": without_places(self.corpus),
            "questions": self.questions,
            "model": backbone,
            "ends": Digest(sha256_file(ends) if ends.is_file() else "none"),
            "chat_template": sha256_bytes(chat.encode()) if chat else None,
            "end_of_text": tokenizer.eos_token_id,
        }


@stage(
    version=3,
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
        selected = select_questions(corpus, tokenizer)
        generation.questions.check_unchanged("questions changed while they were selected")
        write_selection(out, selected)
    selection, state, device = read_selection(out), out / STATE, site.device
    shards = range(-(-len(selection.texts) // corpus.shard_questions))

    def make_shards(numbers: Sequence[int], notes: bool) -> None:
        """Sample and write shards, on one thread, with a model that is loaded once.

        A call whose worker was lost is made again, and finds what it had written. One of several
        calls notes how many of all shards there are.
        """
        check_device(device)
        threads = torch.get_num_threads()
        torch.set_num_threads(_THREADS)
        try:
            backbone = load_backbone(
                corpus.model, revision=corpus.revision, dtype=corpus.dtype, device=device
            )
            questions = read_selection(out)
            for number in numbers:
                first = number * corpus.shard_questions
                texts = questions.texts[first : first + corpus.shard_questions]
                if not shard_path(out, number).is_file():
                    write_shard(out, number, _rows(backbone, corpus, texts, first))
                if notes:
                    done = sum(shard_path(out, other).is_file() for other in shards)
                    leave_note(state, done, len(shards), "sampling")
        finally:
            torch.set_num_threads(threads)

    missing = [number for number in shards if not shard_path(out, number).is_file()]
    workers = max(1, site.lease.config.workers)
    jobs = {
        first: partial(make_shards, share, not first)
        for first in range(workers)
        if (share := missing[first::workers])
    }
    with followed(state):
        dict(site.lease.run(jobs, writes=out))
    return _metrics(out, selection)


def _rows(
    backbone: Backbone, corpus: GeneratedCorpus, texts: Sequence[str], first: int
) -> list[TrajectoryRow]:
    """Return the trajectories of questions, of which the first has a number in the corpus."""
    tokenizer = backbone.require_tokenizer()
    prompts = [prompt_ids(text, corpus, tokenizer) for text in texts]
    sampled = sample_trajectories(backbone, prompts, corpus, corpus.seed, first=first)
    return [
        TrajectoryRow(
            question=first + index,
            trajectory=trajectory,
            ended=answer.ended,
            tokens=len(prompts[index]) + len(answer.ids),
            text=backbone.decode([*prompts[index], *answer.ids]),
        )
        for index, answers in enumerate(sampled)
        for trajectory, answer in enumerate(answers)
    ]


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
