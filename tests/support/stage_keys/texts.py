"""Calls of the stages that make texts and token ids, and what their keys must not hold."""

from __future__ import annotations

from typing import Any

from support.stage_keys.inputs import (
    ALL_EDITS,
    BACKBONE_EDITS,
    CLUSTER,
    NO_MATTER_HOW,
    NOT_WEIGHTS,
    OF_A_DIRECTORY,
    TOKENIZER_EDITS,
    Inputs,
)
from support.stage_keys.variations import Edit, StageCall
from tasks.stages.corpus import corpus_stage, mixture_stage, task_stage, tokenize_stage
from tasks.stages.generate import generate_stage
from umim_core.config.corpus import DocstringCorpus, FilesCorpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.recipe import DEFAULT_TASK


def text_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that makes texts and token ids."""
    source = {"kind": "jsonl", "paths": [str(inputs.questions)]}
    text = {"kind": "text", "paths": [str(inputs.text)]}
    files = FilesCorpus.model_validate(
        {"train": text, "valid": source, "test": text, "out_of_domain": {"other": source}}
    )
    generated = GeneratedCorpus.model_validate(
        {
            "questions": [source],
            "model": str(inputs.backbone),
            "chat": "template",
            "max_tokens": 30,
            "max_question_tokens": 5,
            "out_of_domain": {"other": text},
        }
    )
    mixture = MixtureCorpus.model_validate(
        {
            "parts": {
                "own": {"kind": "files", "train": text, "valid": source, "test": text},
                "docs": {"kind": "docstrings"},
            }
        }
    )
    docstrings = DocstringCorpus(packages=("numpy", "torch"), out_of_domain=("sympy",))
    corpus = inputs.artifacts.make("corpus", "sources.json", "train.jsonl")
    later = {".train_tokens": "is applied where the text is tokenised"}

    def given(config: object, artifact: object) -> dict[str, Any]:
        return {"corpus": config, "generated": artifact}

    asked = "model revision dtype trajectories top_p temperature max_tokens chat template"
    asked += " questions max_question_tokens batch_size shard_questions"
    assert inputs.recipe.task is not None
    return {
        "corpus of docstrings": StageCall(
            corpus_stage,
            given(docstrings, None),
            {f"corpus{n}": r for n, r in later.items()},
        ),
        "corpus of files": StageCall(
            corpus_stage,
            given(files, None),
            {f"corpus{n}": r for n, r in later.items()},
            {
                "the text": Edit(inputs.text, b"w1 w2", b"w1 w1"),
                "the validation text": Edit(inputs.questions, b"w1 w2", b"w1 w1"),
            },
        ),
        "corpus that a model wrote": StageCall(
            corpus_stage,
            given(generated, inputs.artifacts.make("generate", "questions.json", "shards")),
            {f"corpus{n}": r for n, r in later.items()}
            | {f"corpus.{name}": "reaches the stage through what was generated"
               for name in asked.split()},
            {"a text read in place": Edit(inputs.text, b"w1 w2", b"w1 w1")},
        ),
        "mixture": StageCall(
            mixture_stage,
            {"corpus": mixture, "docstrings": corpus},
            {f"corpus{n}": r for n, r in later.items()},
            {
                "the text of a part": Edit(inputs.text, b"w1 w2", b"w1 w1"),
                "the validation text of a part": Edit(inputs.questions, b"w1 w2", b"w1 w1"),
            },
        ),
        "generate": StageCall(
            generate_stage,
            {"lease": inputs.lease, "corpus": generated},
            {
                **{f"lease.{name}": NO_MATTER_HOW for name in (*CLUSTER, "workers")},
                "lease.strategy": "of training only",
                "corpus.splits": "decides what becomes of the text, not the text",
                "corpus.out_of_domain": "decides what becomes of the text, not the text",
                "corpus.train_tokens": "decides what becomes of the text, not the text",
            },
            {
                "the questions": Edit(inputs.questions, b"w1 w2", b"w1 w1"),
                **inputs.edits(*ALL_EDITS),
            },
        ),
        "task": StageCall(
            task_stage,
            {"corpus": corpus, "sizes": inputs.recipe.task, "task": DEFAULT_TASK},
            {},
        ),
        "tokenize": StageCall(
            tokenize_stage,
            {"lease": inputs.lease, "corpus": corpus, "config": files,
             "backbone": str(inputs.backbone), "revision": None},
            {
                "lease": NO_MATTER_HOW,
                **{f"config.{name}": "reaches the stage through the corpus"
                   for name in ("train.", "valid", "test", "out_of_domain")},
                "backbone": NOT_WEIGHTS,
                "revision": OF_A_DIRECTORY,
                "the end of text": "no special token is added to a document",
                **dict.fromkeys(BACKBONE_EDITS, NOT_WEIGHTS),
            },
            inputs.edits(*TOKENIZER_EDITS, *BACKBONE_EDITS),
        ),
    }  # fmt: skip
