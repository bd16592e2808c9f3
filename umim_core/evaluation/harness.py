"""The lm-eval model ``umim``.

    lm_eval --model umim --tasks arc_easy,piqa
    lm_eval --model umim --model_args checkpoint=DIR_OR_NAME,merge=all --tasks wikitext

``merge=prompt`` compresses the context and leaves the continuation raw; ``merge=all`` matches the
whole sequence, scored by two-stage accounting, and merges while generating; ``merge=none`` is
lm-eval's own ``hf`` model, number for number. lm-eval sees raw ids in every mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with lm-eval, ships no types
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import PUBLISHED, check_dtype
from umim_core.baselines.registry import find_baseline, own_model
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge
from umim_core.encodable import encoding_error
from umim_core.errors import BackboneError, ConfigError, CorpusError, EvaluationError, require
from umim_core.evaluation.comparison import compare_in_evaluate
from umim_core.evaluation.generated_rows import GeneratedText, read_gen_kwargs, write_rows
from umim_core.evaluation.model_args import (
    AUTO,
    AskedMerge,
    check_modes,
    check_sizes,
    checkpoint_config,
    known_arguments,
    named_checkpoint,
    one_line_errors,
    open_model,
    recommended,
)
from umim_core.evaluation.scoring import (
    UNKNOWN,
    Likelihood,
    Query,
    ReducedScorer,
    Request,
    RequestScorer,
    Scorer,
    method_scorer,
    named_method,
)
from umim_core.evaluation.sizes import Sizes
from umim_core.inference.choice import fresh_seed
from umim_core.inference.engine import Engine
from umim_core.model.loading import LoadOptions
from umim_core.rules.matcher import Parts
from umim_core.rules.pruning import check_rule_choice
from umim_core.store.artifacts import sha256_bytes
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS, cue_of
from umim_core.text.chat_parts import content_places, encode_parts
from umim_core.text.roles import USER, Role
from umim_core.text.template_process import Chat, Tools, template_of

_log: Final = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its is
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
    def __init__(self, tokenizer: PreTrainedTokenizerBase, roles: Sequence[Role]) -> None:
        self.applied = False
        self._tokenizer, self._roles = tokenizer, roles
        self._places: dict[str, list[tuple[int, int]]] = {}

    def note(self, chat: Chat, text: str, render: Callable[[Chat, Tools | None], str]) -> None:
        """Note a chat, the text that the template made of it, and how it writes others."""
        self._places[text] = content_places(chat, text, render, roles=self._roles)

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
        encoded, ranges = encode_parts(self._tokenizer, text, places)
        end = max((end for _, end in ranges), default=0)
        for front in (0, 1):  # a BOS
            if list(ids[front : front + end]) == encoded[:end].tolist():
                return tuple((first + front, last + front) for first, last in ranges)
        return ()


def query_of(request: Instance) -> Query:
    """Return what a request asks; ``UNKNOWN`` of a task that neither we nor the paper have."""
    name, row, context = request.task_name, request.doc, str(request.args[0])
    if name in GENERATION_TASKS.names():
        return Query(
            row["question"], row["answer_prefix"] or cue_of(GENERATION_TASKS.find(name).prompt)
        )
    if name in TASKS.names():
        return Query(row["context"], TASKS.find(name).form.cue)
    stock = str(name).removeprefix(_OWN)
    if stock == "copa":  # the sentence that is to be continued
        return Query(context or row["premise"])
    question = row.get(_COLUMNS.get(stock, ""))
    if not isinstance(question, str) or (context and question not in context):
        return UNKNOWN
    return Query(question, context.rpartition(question)[2])


class UmimLM(HFLM):  # type: ignore[misc]  # lm-eval ships no types
    """An lm-eval model that reads compressed inputs.

    Its arguments are those of ``docs/reference.md``; others mean what they mean to ``hf``. From
    Python a checkpoint and a backbone may be loaded ones, and ``protect`` and ``roles`` lists.

    Raises:
        ConfigError: If ``merge`` or ``method`` is unknown, a method comes with another ``merge``
            than ``prompt``, what needs merging (``raw_tail``, ``compare``, ``budget`` ...) with
            ``none``, or ``target_tr`` with ``budget`` or with a span merger.
        CheckpointError: If the checkpoint cannot be loaded.
        BackboneMismatchError: If the backbone is not the checkpoint's own.
    """

    @one_line_errors()
    @known_arguments
    def __init__(
        self,
        checkpoint: str | Path | Checkpoint | None = None,
        merge: AskedMerge | None = AUTO,
        backbone: str | Backbone | None = None,
        revision: str | None = None,
        dtype: str = PUBLISHED,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        method: str | None = None,
        target_tr: float | None = None,
        allow_backbone_mismatch: str | None = None,
        raw_tail: int | None = None,
        compare: Literal["base"] | None = None,
        protect: str | Sequence[str] | None = None,
        budget: float | None = None,
        roles: str | Sequence[Role] | None = None,
    ) -> None:
        named_roles = cast("list[Role]", roles.split("+")) if isinstance(roles, str) else roles
        given: AskedMerge = "none" if merge is None else merge
        rules_tr = target_tr if method is None else None
        check_rule_choice(budget, rules_tr)
        check_sizes(batch_size, max_batch_size, max_length)
        rule, remedy = "revision is that of a backbone on the hub", "Name the backbone, too."
        require(not revision or isinstance(backbone, str), ConfigError, rule, revision, remedy)
        reads = given != "none" or backbone is None
        asked = {
            "compare": compare,
            "method": method,
            "target_tr": target_tr,
            "protect": protect,
            "budget": budget,
            "roles": named_roles,
            "allow_backbone_mismatch": allow_backbone_mismatch,
        }
        # Before anything is fetched, and then with what the checkpoint recommends.
        check_modes(asked, "prompt" if given == "auto" else given, raw_tail or 0)
        check_dtype(dtype)
        source = named_checkpoint(checkpoint) if reads else None
        config = None if source is None else checkpoint_config(source)
        self.merge, raw_tail = recommended(config, given, raw_tail, method, target_tr)
        self.target = check_modes(asked, self.merge, raw_tail)
        named = LoadOptions(
            backbone=backbone,
            backbone_revision=revision,
            dtype=dtype,
            device=device,
            allow_backbone_mismatch=allow_backbone_mismatch,
            protect=protect,
            budget=budget,
            target_tr=rules_tr,
        )
        opened = open_model(source, config, self.merge, named)
        merged_model = opened.reading(self.merge, raw_tail)
        self.backbone = merged_model.backbone
        if self.backbone.tokenizer is None:
            raise BackboneError("lm-eval needs a tokenizer", self.backbone.name, "Attach one.")
        super().__init__(
            pretrained=self.backbone.model,
            tokenizer=self.backbone.tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=self.backbone.max_positions if max_length is None else max_length,
            add_bos_token=add_bos_token,
        )
        self.merged_model, self.method, self.compare = merged_model, method, compare
        self.is_compared = False  # while lm-eval runs with the base model beside
        roles_of_config = USER if config is None else config.roles
        self.chats = ChatContexts(self.backbone.tokenizer, named_roles or roles_of_config)
        self._decode_bounds: dict[float | None, None] = {}  # of generated texts, in their order
        self.scorer: RequestScorer | None = None  # for lm-eval's own ``hf`` scores
        # By task, question, and whether a context stands before what is scored.
        self._sizes: dict[tuple[str | None, int | None, bool], Sizes] = {}
        compare_in_evaluate(UmimLM)
        if method is not None:
            made = find_baseline(method).make(self.backbone, merged_model.require_matcher())
            self.method = named_method(method, own_model(method))
            self.scorer = method_scorer(made, merged_model, self.max_length, self.target)
        elif self.merge != "none":
            self.scorer = Scorer(merged_model, self.max_length, self.merge)
        read = self.backbone.name, self.backbone.dtype, self.merge, raw_tail
        _log.info("umim: backbone %s, %s, merge=%s, raw_tail=%d", *read)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> UmimLM:
        """Let the model's arguments win over the command's, whose device has a default."""
        named = (additional_config or {}).items()
        return cls(**({name: value for name, value in named if value is not None} | arg_dict))

    @one_line_errors()
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is True or (chat_template and self.tokenizer.chat_template is None):
            template_of(self.tokenizer, None)  # that there is none is an error of ours
        found: str | None = super().chat_template(chat_template)
        return found

    def get_model_info(self) -> dict[str, Any]:
        """Add what was realised to lm-eval's result file (``config.umim``), in all and by task."""
        bounds = [*self._decode_bounds]  # several where the kwargs of tasks differ
        model, merges = self.merged_model, self.merge != "none"
        rules = model.require_matcher().rules if merges else None
        prices = None if rules is None else rules.prices
        info: dict[str, Any] = super().get_model_info()
        info["umim"] = {
            "backbone": self.backbone.name,
            "backbone_fingerprint": self.backbone.fingerprint,
            "tokenizer_fingerprint": self.backbone.tokenizer_fingerprint,
            "module_digest": model.require_module().digest() if merges else None,
            "rules_digest": None if rules is None else rules.digest,
            "prices_digest": None if prices is None else sha256_bytes(prices.tobytes()),
            "dtype": str(self.backbone.dtype),
            "merge": self.merge,
            "unit_positions": model.unit_positions if merges else None,
            "raw_tail": model.raw_tail,
            "method": self.method or "umim",
            **({} if self.target is None else {"target_tr": self.target.target}),
            "decode_max_damage": bounds if len(bounds) > 1 else next(iter(bounds), None),
            **self.realised,
            "tasks": {
                str(task): sum(self.question_sizes(task).values(), Sizes()).reductions()
                for task in dict.fromkeys(task for task, _, _ in self._sizes)
            },
        }
        return info

    @one_line_errors()
    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuse lm-eval's cache: it would give answers of other rules and other modules."""
        rule = "lm-eval's cache (--use_cache) keeps answers by their questions, whatever merged"
        remedy = "Leave it out; --limit and --samples make runs short."
        fits = cache_hook.dbdict is None or self.merge == "none"
        require(fits, ConfigError, rule, f"merge={self.merge}", remedy)
        super().set_cache_hook(cache_hook)

    @property
    def realised(self) -> dict[str, float | None]:
        """Reductions over all inputs so far by name; None where nothing was counted.

        ``context_token_reduction`` is over contexts and generation prompts that are matched alone.
        """
        if self.scorer is None or self.merge == "none":
            return {"token_reduction": 0.0, "context_token_reduction": 0.0}
        found = self.scorer.total.reductions()
        return found | ({} if self.scorer.total.tokens else {"token_reduction": None})

    def question_sizes(self, task: str | None) -> dict[int | None, Sizes]:
        """Return the sizes of a task's questions since ``forget_sizes``, those that count."""
        # A text without context, which ``acc_seq`` asks for, has nothing to merge.
        sizes = sorted(self._sizes.items(), key=lambda item: item[0][2])
        return {question: size for (name, question, _), size in sizes if name == task}

    def forget_sizes(self) -> None:
        self._sizes = {}

    def _count(self, request: Instance, size: Sizes) -> None:
        key = request.task_name, request.doc_id, bool(request.args[0])
        if self.merge != "none":
            self._sizes[key] = self._sizes.get(key, Sizes()) + size

    def base_model(self) -> UmimLM:
        return UmimLM(
            merge="none",
            backbone=self.backbone,
            batch_size=self.batch_size,
            max_batch_size=self.max_batch_size,
            max_length=self.max_length,
            add_bos_token=self.add_bos_token,
        ).sharing_contexts()

    def sharing_contexts(self) -> UmimLM:
        """Score answers of one context in one forward, with ``merge=none``, too.

        lm-eval's ``hf`` reads the context once for each answer; log-probabilities are the same but
        for rounding.
        """
        if self.scorer is None:
            self.scorer = Scorer(self.merged_model, self.max_length)
        return self

    def check_requests(self, requests: Sequence[Instance]) -> None:
        """Refuse before the first forward texts that are none, and what would not be compared."""
        rule = "compare=base needs lm-eval's evaluate as it is once a model was made"
        found = "one that was imported before, which knows no differences"
        remedy = "Call lm_eval.evaluate, or import evaluate behind the model."
        compared = self.compare is None or self.is_compared
        require(compared, EvaluationError, rule, found, remedy)
        for request in requests:
            text, *more = request.args  # an answer, or kwargs of generation
            stops = (more[0].get("until") or []) if more and isinstance(more[0], dict) else more
            for part in (text, *(stops if isinstance(stops, list) else [stops])):
                value = f"{str(part)[:80]!r} of {request.task_name or 'a task'}"
                remedy = "Correct the task's data."
                rule = "text must not hold lone surrogates"
                strings = "texts and stops of a task must be strings"
                require(isinstance(part, str), CorpusError, strings, value, remedy)
                require(encoding_error(part) is None, CorpusError, rule, value, remedy)

    @one_line_errors()
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        self.check_requests(requests)
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        rule = f"an answer must hold 1 to {self.max_length} tokens"
        remedy = "Correct the task's data, or use a backbone with more positions."
        for number, (texts, _, answer) in enumerate(pairs):
            found = f"{len(answer)} tokens of request {number}: {texts[1]!r}"
            fits = 0 < len(answer) <= self.max_length
            require(fits, EvaluationError, rule, found, remedy)
        if self.scorer is None:
            return cast("list[Any]", self._loglikelihood_tokens(pairs, disable_tqdm))
        asked = [
            Request(np.array(context), np.array(answer), query, self.chats.parts(texts[0], context))
            for (texts, context, answer), query in zip(pairs, self._queries(requests), strict=True)
        ]
        scores = self._score(self.scorer, asked, requests, disable_tqdm)
        return [(score.log_prob, score.greedy) for score in scores]

    def _score(
        self,
        scorer: RequestScorer,
        asked: Sequence[Request],
        owners: Sequence[Instance],
        disable_tqdm: bool,
    ) -> list[Likelihood]:
        """Score what was asked, each for one of lm-eval's requests, and count its size."""
        longest = max((len(each.context) + len(each.continuation) for each in asked), default=1)
        with tqdm(total=len(asked), disable=disable_tqdm, desc="Scoring") as bar:
            scores = scorer.score(asked, self.rows_per_forward(longest), bar.update)
        for owner, score in zip(owners, scores, strict=True):
            self._count(owner, score.sizes)
        self.report()
        return scores

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode as ``hf`` does; a context of no token is the prefix token, in every mode."""
        if context:
            before, ids = super()._encode_pair(context, continuation)
            if before:
                return before, ids
        ids = self.tok_encode(context + continuation, add_special_tokens=False)
        cut = int(ids[:1] == [self.prefix_token_id])
        return [self.prefix_token_id], ids[cut:]

    @one_line_errors()
    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts; with ``merge=prompt`` there is no context to compress."""
        self.check_requests(requests)
        if self.merge == "prompt":
            _log.warning("umim: rolling texts are all continuation; merge=all compresses them")
        if self.scorer is None:
            return cast("list[float]", super().loglikelihood_rolling(requests, disable_tqdm))
        windows: list[Request] = []  # as ``hf`` cuts them
        owners: list[int] = []  # text of each window
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            cut = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows += [
                Request(np.array(a), np.array(b)) for a, b in map(make_disjoint_window, cut)
            ]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        scores = self._score(self.scorer, windows, [requests[k] for k in owners], disable_tqdm)
        for owner, score in zip(owners, scores, strict=True):
            totals[owner] += score.log_prob
        return totals

    @one_line_errors()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate until a stop string: prompts compressed; generated tokens with ``merge=all``."""
        self.check_requests(requests)
        scorer = self.scorer or Scorer(self.merged_model, self.max_length)
        merge: Merge = self.merge if isinstance(scorer, Scorer) else "none"
        engine, queries = Engine(scorer.merged_model), self._queries(requests)
        prompts = [self._prompt(request.args[0]) for request in requests]
        seed = None  # drawn when a text is sampled, once for all, so that batches do not matter
        ordered = Collator(
            [(number, request.args[1]) for number, request in enumerate(requests)],
            sort_fn=lambda pair: (-len(prompts[pair[0]]), requests[pair[0]].args[0]),
            group_by="gen_kwargs",
            group_fn=lambda pair: pair[1],
        )
        longest = max(map(len, prompts), default=1)
        end = self.eot_token_id, self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        warn = partial(warning_once, _log)
        texts: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
            for chunk in ordered.get_batched(n=self.rows_per_forward(longest)):
                numbers, (given, *_) = zip(*chunk, strict=True)
                kwargs = read_gen_kwargs(given, self.max_gen_toks, self.backbone, end, warn)
                seed = fresh_seed() if kwargs.options.settings.do_sample and seed is None else seed
                options = replace(kwargs.options, merge=merge, seed=seed, streams=numbers)
                self._decode_bounds[options.decode_bound(scorer.merged_model)] = None
                of_chunk = [requests[number].args[0] for number in numbers]
                read = [
                    (prompts[number], queries[number], self.chats.parts(text, prompts[number]))
                    for number, text in zip(numbers, of_chunk, strict=True)
                ]
                rows = write_rows(engine, scorer, read, replace(kwargs, options=options))
                for number, prompt, (row, cut, size) in zip(numbers, of_chunk, rows, strict=True):
                    text = postprocess_generated_text(self.tok_decode(cut), kwargs.until, None)
                    self._count(requests[number], size)
                    if self.merge != "none":
                        text = GeneratedText.of_row(text, row, size.context_tokens)
                    self.cache_hook.add_partial("generate_until", (prompt, given), text)
                    texts.append(text)
                bar.update(len(numbers))
        if self.merge != "none":
            self.report()
        return cast("list[str]", ordered.get_original(texts))

    def _prompt(self, text: str) -> np.ndarray:
        ids = self.tok_batch_encode([text])[0][0].tolist() if text else []
        return np.asarray(ids or [self.prefix_token_id], dtype=np.int64)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        def render(chat: Chat, tools: Tools | None = None) -> str:
            history = [dict(message) for message in chat]
            return str(super(UmimLM, self).apply_chat_template(history, add_generation_prompt))

        text = render(chat_history)
        if self.scorer is not None:
            self.chats.note(chat_history, text, render)
        return text

    def _queries(self, requests: Sequence[Instance]) -> list[Query]:
        """Return what token reducers must know of each request."""
        if not isinstance(self.scorer, ReducedScorer):
            return [UNKNOWN] * len(requests)
        queries = [query_of(request) for request in requests]
        asked = zip(requests, queries, strict=True)
        if unknown := {str(request.task_name) for request, query in asked if query == UNKNOWN}:
            names = ", ".join(sorted(unknown))
            _log.warning("umim: no question or cue of %s is known: none is protected", names)
        return queries

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

    def report(self) -> None:
        known = {name: value for name, value in self.realised.items() if value is not None}
        found = " ".join(f"{name}={value:.4f}" for name, value in known.items())
        _log.info("umim: merge=%s %s", self.merge, found)
