"""Multiple-choice questions as token sequences for training, and as rules of their task.

One character per token, prompt ``{context}?``, delimiter " "::

    Question("ab", ("x", "yz"), gold=1)
    task sequence     a b ? _ y z      mergeable 3 (context) or 6 (sequence)
    encoded question  context a b ?    endings (_ x) (_ y z)    gold 1

Task rules are bigrams of training questions, kept by a threshold or within a budget. There is one
ragged segment per question, so that no bigram joins two questions. With the prompt ``{context}``::

    Question("ab", ("ab", "x"), gold=0)    sequence  a b _ a b     (a,b):2 (b,_):1 (_,a):1
                                           context   a b           (a,b):1

Source: paper, "Task-Specific Merge-Rule Construction".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from umim_core.config.model_base import SPLITS, Split
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import CorpusError, require
from umim_core.mining.counting import count_ngrams
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.store.artifacts import sha256_bytes
from umim_core.task_sets.spec import Question, QuestionForm
from umim_core.text.token_ids import Ints, flat

Encode = Callable[[str], list[int]]

DEFAULT_MAX_LENGTH: Final = 128  # paper, "Task-specific rule construction"
TASK_ORDER: Final = 2


@dataclass(frozen=True)
class EncodedQuestion:
    """Token ids of a prompt [T] and of every answer [n_k], and the index of the correct one."""

    context: Ints
    endings: tuple[Ints, ...]
    gold: int


def encode_pair(encode: Encode, context: str, continuation: str) -> tuple[Ints, Ints]:
    """Encode prompt [T] and answer [n] as the lm-eval harness does.

    The answer is what the joint text has beyond as many tokens as the prompt alone; blanks at the
    prompt's end move to the answer. The prompt's ids therefore never depend on the answer.

    Source: lm_eval.api.model.TemplateLM._encode_pair (0.4.13).
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    whole = np.asarray(encode(stripped + continuation), dtype=np.int64)
    alone = np.asarray(encode(stripped), dtype=np.int64)
    return alone, whole[len(alone) :]


def task_sequences(
    questions: Sequence[Question],
    encode: Encode,
    form: QuestionForm,
    max_length: int = DEFAULT_MAX_LENGTH,
) -> list[tuple[Ints, int]]:
    """Build one sequence per question: prompt and correct answer, as :func:`encode_questions` does.

    Rules and SFT so read what is scored and what preferences are trained on.

    Returns:
        Raw ids [T] of each, and the leading tokens that rules may merge: all, or the prompt alone.
    """
    sequences = []
    for question in encode_questions(questions, encode, form, max_length):
        ids = np.concatenate([question.context, question.endings[question.gold]])
        sequences.append((ids, len(question.context if form.part == "context" else ids)))
    return sequences


def encode_questions(
    questions: Sequence[Question],
    encode: Encode,
    form: QuestionForm,
    max_length: int = DEFAULT_MAX_LENGTH,
) -> list[EncodedQuestion]:
    """Encode every choice of every question for scoring.

    The answers stay whole; the prompt loses leading tokens until prompt and longest answer fit.
    """
    encoded = []
    for question in questions:
        text = form.prompt.format(context=question.context)
        pairs = [encode_pair(encode, text, form.delimiter + choice) for choice in question.choices]
        endings = tuple(ending for _, ending in pairs)
        sizes = [len(ending) for ending in endings]
        if max(sizes) >= max_length or min(sizes) == 0:
            raise CorpusError(
                f"every answer must hold 1 to {max_length - 1} tokens",
                f"{sizes} in question {question.id or question.context!r}",
                "Give every answer a text that the tokenizer knows."
                if min(sizes) == 0
                else "Raise max_tokens or shorten the answers.",
            )
        context = pairs[0][0][-(max_length - max(sizes)) :]  # every pair has the same prompt
        encoded.append(EncodedQuestion(context, endings, question.gold))
    return encoded


def split_questions(
    given: Mapping[Split, Sequence[Question]], sizes: Mapping[Split, int]
) -> dict[Split, list[Question]]:
    """Return three splits of questions, none of which shares a context with another.

    Each is in the order of the hash of its ids.
    """
    rule = "a task must have training questions"
    require(bool(given.get("train")), CorpusError, rule, "none", "Give their file.")
    trained = sorted(given["train"], key=_place)
    splits: dict[Split, list[Question]] = {}
    taken: set[str] = set()
    for split in reversed(SPLITS):
        source = sorted(given[split], key=_place) if given.get(split) else trained
        fresh = [question for question in source if question.context not in taken]
        splits[split] = fresh[: sizes[split]]
        taken |= {question.context for question in splits[split]}
    value = f"{len(given['train'])} training questions for {dict(sizes)}"
    remedy = "Lower the sizes of valid and test, or give more questions."
    for split in SPLITS:
        rule = f"the split {split} must hold questions that no later split asks"
        require(bool(splits[split]), CorpusError, rule, value, remedy)
    return splits


def _place(question: Question) -> tuple[bytes, str]:
    text = question.id or question.context
    return hashlib.blake2b(text.encode(), digest_size=8).digest(), text


def mine_task_rules(
    questions: Sequence[Question],
    encode: Encode,
    options: RuleOptions,
    form: QuestionForm,
    *,
    max_length: int = DEFAULT_MAX_LENGTH,
    excluded: Iterable[int] = (),
    tokenizer_fingerprint: str | None = None,
) -> RuleSet:
    """Mine the bigrams of a task: of what may merge of its training questions, each a segment.

    ``encode`` adds no special tokens; questions with an answer that are longer than ``max_length``
    tokens lose their beginning. The paper takes tau 2000, 200, 50, 5 and 1 for HellaSwag, 5 for
    ARC, and no overlap filter.
    """
    ids, offsets = flat(
        [ids[:mergeable] for ids, mergeable in task_sequences(questions, encode, form, max_length)]
    )
    counts = count_ngrams(ids, offsets, options.tau, excluded, longest=TASK_ORDER)
    origin = RuleOrigin(
        options=options,
        tokenizer_fingerprint=tokenizer_fingerprint,
        corpus_digest=sha256_bytes(ids.tobytes()),
    )
    return RuleSet.from_counts(counts, origin)
