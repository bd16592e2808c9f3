"""A tiny model on disk, questions for it, and the corpus that it generates from them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.dying import die_at
from support.sites import here
from tasks.cluster.lease import ClusterLease
from tasks.run.site import Site
from tasks.run.stage import Artifact
from tasks.stages.generate import Generation, generate_stage
from umim_core.config.corpus import GeneratedCorpus

QUESTIONS = [f"w{1 + i} w{30 - i} w5" for i in range(20)]
LONG = ["w1 w2 w3 w4 w5 w6", "w2 w2 w2 w2 w2 w2"]
MAX_TOKENS = 9
SHARDS = 5


def tiny_generated_corpus(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GeneratedCorpus:
    """Write the model and the questions, two of them too long and one twice, into a folder."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = folder / "questions.jsonl"
    asked = [*QUESTIONS[:10], *LONG, QUESTIONS[0], *QUESTIONS[10:]]
    path.write_text("".join(json.dumps({"problem": text}) + "\n" for text in asked))
    return GeneratedCorpus.model_validate(
        {
            "questions": [{"kind": "jsonl", "paths": [str(path)], "field": "problem"}],
            "model": str(folder / "model"),
            "max_tokens": MAX_TOKENS,
            "max_question_tokens": 5,
            "temperature": 1.5,
            "splits": {"train": 0.7, "valid": 0.2, "test": 0.1},
            "batch_size": 3,
            "shard_questions": 4,
        }
    )


def generate(root: Path, corpus: GeneratedCorpus, lease: ClusterLease | None = None) -> Artifact:
    """Run the stage, in this process if it is lent no cluster."""
    site = here(root) if lease is None else Site(root, lease)
    return generate_stage(generation=Generation(corpus)).build(site)


def generate_until(rank: int, root: Path, corpus: str, place: str, number: int, when: str) -> None:
    """Generate a corpus, given as JSON, in a process that kills itself; see ``die_at``."""
    die_at(place, number, when)
    generate(root, GeneratedCorpus.model_validate_json(corpus))
