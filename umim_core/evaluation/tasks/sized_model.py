"""An lm-eval model that counts the raw tokens and units of every request.

lm-eval's cache of responses (``--use_cache``) finds a response again by the text of its request
alone: with one file, the answers of a checkpoint would stand for those of another. Here the table
in the file is named by a digest of whatever decides the answers, so those of other models are never
found.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook, hash_args
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import warning_once
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with lm-eval, ships no types
from transformers import PreTrainedTokenizerBase

from umim_core.config.form import Merge
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.method_scoring import AnyScorer, EvictedScorer, ReducedScorer
from umim_core.evaluation.scoring import UNKNOWN, Asked, Finished, Likelihood, Request, Sizes
from umim_core.rules.matcher import Parts
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS, cue_of
from umim_core.text.chat_parts import Chat, content_places, encode_parts

_SIZES: Final = "umim sizes of "
_log: Final = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger


def table_name(identity: Mapping[str, object]) -> str:
    """Return the name of a model's table."""
    return f"umim-{sha256_bytes(canonical_json(identity).encode())}"


def use_own_table(
    hook: CacheHook, identity: Mapping[str, object], counted: Sequence[str] = ()
) -> None:
    """Let a cache read and write the responses of one model only, by what decides its answers.

    Without a cache nothing is done; the one that lm-eval asks is the same object. ``counted`` are
    fields of ``Sizes`` that this model's responses must have and former versions did not keep.
    Responses without them are not read: a mean over some of the requests would pass for one over
    all. They are made again, and a warning says so.
    """
    database: Any = hook.dbdict
    if database is None:
        return
    former = table_name(identity)
    name = table_name({**identity, "counted": [*counted]}) if counted else former
    there = type(database).get_tablenames(database.filename)
    if former in there and name not in there:
        _log.warning(
            "umim: the cache %s holds responses of this model without their %s, from a former "
            "version; they are not used, and every request is answered anew",
            database.filename,
            ", ".join(counted),
        )
    type(database)(database.filename, tablename=name).close()  # makes the table where it is missing
    database.tablename = name


_OWN: Final = "umim_"
# Column of the question, by the name of lm-eval's task; its cue stands behind it in the prompt.
_COLUMNS: Final = {
    "aime24": "Problem",
    "amc23": "question",
    "arc_challenge": "question",
    "arc_easy": "question",
    "gsm8k_cot_zeroshot": "question",
    "hellaswag": "query",
    "longbench_qmsum": "question",
    "openbookqa": "question_stem",
    "piqa": "goal",
    "qmsum": "question",
}


_CPU_TOKENS: Final = 2048  # of a forward for batch_size=auto; more are no faster
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


class ChatContexts:
    """Contexts by text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.applied = False
        self._tokenizer = tokenizer
        self._places: dict[str, list[tuple[int, int]]] = {}

    def note(self, chat: Chat, text: str, render: Callable[[Chat], str]) -> None:
        """Note a chat, the text that the template made of it, and how it writes others."""
        self._places[text] = content_places(chat, text, render)

    def parts(self, text: str, ids: Sequence[int] | NDArray[np.int64]) -> Parts | None:
        """Return the tokens of a context that may merge; None for all, where it is no chat."""
        places = self._places.get(text)
        if places is None:
            if self.applied:
                warning_once(
                    _log,
                    "umim: chats that lm-eval cached (--cache_requests) do not say what users "
                    "said: nothing of them merges",
                )
            return () if self.applied else None
        own, ranges = encode_parts(self._tokenizer, text, places)
        end = max((end for _, end in ranges), default=0)
        for front in (0, 1):  # a BOS
            if list(ids[front : front + end]) == own[:end].tolist():
                return tuple((first + front, last + front) for first, last in ranges)
        return ()


def asked_by(request: Instance) -> Asked:
    """Return what a request asks; ``UNKNOWN`` of a task that neither we nor the paper have."""
    name, row, context = request.task_name, request.doc, str(request.args[0])
    if name in GENERATION_TASKS.names():
        return Asked(
            row["question"], row["answer_prefix"] or cue_of(GENERATION_TASKS.find(name).prompt)
        )
    if name in TASKS.names():
        return Asked(row["context"], TASKS.find(name).form.cue)
    stock = str(name).removeprefix(_OWN)
    if stock == "copa":  # the sentence that is to be continued
        return Asked(context or row["premise"])
    question = row.get(_COLUMNS.get(stock, ""))
    if not isinstance(question, str) or (context and question not in context):
        return UNKNOWN
    return Asked(question, context.rpartition(question)[2])


class SizedModel(HFLM):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval's ``hf`` model with a scorer in its place, and the sizes of what it scored.

    Attributes:
        merge: What is merged.
        scorer: Scores inputs and counts them; None for lm-eval's own ``hf`` scores.
        compare: ``base`` for a model whose evaluations run the base model, too.
        chats: Contexts that a chat template wrote.
    """

    merge: Merge
    compare: Literal["base"] | None = None
    scorer: AnyScorer | None = None
    chats: ChatContexts
    _sizes: dict[int, Sizes] | None = None  # by id of a request, within an evaluation
    _asked: Mapping[str, Asked] = MappingProxyType({})  # by context, of the latest requests

    @abstractmethod
    def base_model(self) -> LM | None:
        """Return the model to compare with; None for no comparison."""

    def rows_per_forward(self, longest: int) -> int:
        """Return the batch size; ``auto`` is what fits for inputs of ``longest`` raw tokens."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        return self._detect_batch_size([(None, [0] * longest, [0])])

    def _detect_batch_size(
        self, requests: Sequence[TokenRequest] | None = None, pos: int = 0
    ) -> int:
        """Return what ``auto`` is: tried on a GPU, counted on a CPU.

        Without requests, as for rolling windows, inputs are as long as the model takes.
        """
        if self.device.type != "cpu":
            return int(super()._detect_batch_size(requests, pos))
        limit = int(self.max_length)
        longest = min(sum(map(len, requests[pos][1:])), limit) if requests else limit
        return max(1, min(int(self.max_batch_size), _CPU_TOKENS // longest))

    @property
    def realised(self) -> dict[str, float | None]:
        """Reductions over all inputs so far by name; None where nothing was counted."""
        counted = self.scorer is None or self.scorer.total.tokens > 0
        reductions: dict[str, float | None] = {
            "token_reduction": self.token_reduction if counted else None,
            "context_token_reduction": self.context_token_reduction,
        }
        if self.scorer is not None and self.scorer.total.shortfall:
            reductions["shortfall"] = self.scorer.total.shortfall_share
        if self.scorer is not None and self.scorer.total.columns is not None:
            reductions["cache_reduction"] = self.scorer.total.cache_reduction
        return reductions

    @property
    def counted(self) -> tuple[str, ...]:
        """Fields of ``Sizes`` that this model's responses have and a former version's lack."""
        if isinstance(self.scorer, EvictedScorer):
            return ("columns", "shortfall")
        return ("shortfall",) if isinstance(self.scorer, ReducedScorer) else ()

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens over all inputs so far, continuations included."""
        return self.scorer.total.token_reduction if self.scorer else 0.0

    @property
    def context_token_reduction(self) -> float | None:
        """The same over contexts and generation prompts alone; None if none was matched alone."""
        return self.scorer.total.context_token_reduction if self.scorer else 0.0

    def start_counting(self) -> None:
        """Forget the sizes of earlier requests and keep those of the next."""
        self._sizes = {}

    def stop_counting(self) -> None:
        """Forget the sizes of requests and keep no more of them."""
        self._sizes = None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a chat by the template, and note where what users say stands in it."""

        def render(chat: Chat) -> str:
            history = [dict(message) for message in chat]
            return str(super(SizedModel, self).apply_chat_template(history, add_generation_prompt))

        text = render(chat_history)
        if self.scorer is not None:
            self.chats.note(chat_history, text, render)
        return text

    def note_questions(self, requests: Sequence[Instance]) -> None:
        """Note what the contexts of requests ask, for token reducers."""
        if not isinstance(self.scorer, ReducedScorer):
            return
        self._asked = {str(request.args[0]): asked_by(request) for request in requests}
        if unknown := {str(r.task_name) for r in requests if self.asked(r.args[0]) == UNKNOWN}:
            names = ", ".join(sorted(unknown))
            _log.warning("umim: no question or cue of %s is known: none is protected", names)

    def asked(self, context: str) -> Asked:
        """Return what a context of the latest requests asks."""
        return self._asked.get(context, UNKNOWN)

    def check_comparison(self) -> None:
        """Refuse requests of a comparing model that no comparison has begun for."""
        if self.compare is not None and self._sizes is None:
            raise ConfigError(
                f"compare={self.compare} needs evaluate() as it is after a UmimLM was made",
                "a call of the function that was imported before",
                "Use lm_eval.simple_evaluate, or call lm_eval.evaluator.evaluate by that name.",
            )

    def sizes_of(self, request: Instance) -> Sizes | None:
        """Return the size of a request since ``start_counting``, its repeats together.

        A request that lm-eval answered from its cache is added to the model's counts here.
        """
        sizes = (self._sizes or {}).get(id(request))
        cache = self.cache_hook.dbdict
        if sizes is None and self.scorer is not None and self.merge != "none" and cache is not None:
            cached = cache.get(hash_args(_SIZES + request.request_type, request.args))
            if cached is not None:
                sizes = Sizes(*cached)
                self.scorer.total += sizes
                self.count_cached(request)
        return sizes

    def count_cached(self, request: Instance) -> None:
        """Note what else a request settles that was answered from the cache; nothing here."""

    def score_tokens(
        self,
        requests: Sequence[TokenRequest],
        finished: Finished,
        disable_tqdm: bool,
        batch_size: int | None = None,
    ) -> list[Likelihood]:
        """Score (texts, context ids, continuation ids) with the scorer, under a progress bar.

        Of their texts the context tells what a request asks. ``finished`` is called with the scores
        of every forward, as soon as it is done; ``batch_size`` None is the model's own.
        """
        if self.scorer is None:
            raise EvaluationError("a scorer is needed", self.merge, "Use merge=prompt or all.")
        ids = [
            Request(
                np.asarray(context, np.int64),
                np.asarray(continuation, np.int64),
                UNKNOWN if texts is None else self.asked(texts[0]),
                None if texts is None else self.chats.parts(texts[0], context),
            )
            for texts, context, continuation in requests
        ]
        rows = batch_size or self.rows_per_forward(
            max((len(context) + len(ending) for _, context, ending in requests), default=1)
        )
        with tqdm(total=len(ids), disable=disable_tqdm, desc="Scoring") as bar:

            def step(done: Mapping[int, Likelihood]) -> None:
                finished(done)
                bar.update(len(done))

            scored = self.scorer.score(ids, rows, step)
        self.report()
        return scored

    def keep_answer(
        self, kind: str, arguments: tuple[Any, ...], answer: object, sizes: Sizes
    ) -> None:
        """Keep a response in lm-eval's cache, if there is one, so that a killed run resumes.

        The sizes are kept first: a kill between the two leaves no response without them.
        """
        self.cache_hook.add_partial(_SIZES + kind, arguments, astuple(sizes))
        self.cache_hook.add_partial(kind, arguments, answer)

    def count_requests(self, requests: Sequence[Instance], sizes: Sequence[Sizes]) -> None:
        """Remember the sizes of requests for the evaluation that asks."""
        if self._sizes is not None:
            for request, size in zip(requests, sizes, strict=True):
                self._sizes[id(request)] = self._sizes.get(id(request), Sizes()) + size

    def report(self) -> None:
        """Log the token reduction so far."""
        alone = self.context_token_reduction
        part = "" if alone is None else f", of contexts alone {alone:.4f}"
        if self.scorer is not None and self.scorer.total.columns is not None:
            part += f", of the cache {self.scorer.total.cache_reduction or 0.0:.4f}"
        _log.info("umim: merge=%s token_reduction=%.4f%s", self.merge, self.token_reduction, part)
