"""The lm-eval model ``umim``.

    lm_eval --model umim --tasks arc_easy,piqa
    lm_eval --model umim --model_args checkpoint=DIR_OR_NAME,merge=all --tasks wikitext

What is merged is what the checkpoint recommends, as in ``UMIM.generate``, unless ``merge`` or
``raw_tail`` say otherwise. ``merge=prompt`` compresses the context and leaves the continuation raw;
``merge=all`` matches the whole sequence, scored by two-stage accounting, and merges while
generating; ``merge=none`` is lm-eval's own ``hf`` model, number for number. lm-eval sees raw ids in
every mode.
``compare=base`` runs the base model on the same questions, too, and adds paired differences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm  # type: ignore[import-untyped]  # comes with lm-eval, ships no types

from umim_core import __version__
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import PUBLISHED
from umim_core.baselines.methods import BASELINES
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge
from umim_core.encodable import encoding_error
from umim_core.errors import BackboneError, CorpusError, EvaluationError, require
from umim_core.evaluation.console import bars_are_hidden, known_arguments, one_line_errors
from umim_core.evaluation.generated_rows import GeneratedText, RowWriter, Wanted, read_gen_kwargs
from umim_core.evaluation.method_scoring import answer_identity, method_scorer, named_method
from umim_core.evaluation.model_args import (
    AUTO,
    AskedMerge,
    check_modes,
    open_model_args,
    recommended,
    target_of,
)
from umim_core.evaluation.scoring import Likelihood, Scorer, Sizes
from umim_core.evaluation.tasks.evaluate_hook import extend_evaluate
from umim_core.evaluation.tasks.sized_model import (
    ChatContexts,
    SizedModel,
    TokenRequest,
    use_own_table,
)
from umim_core.inference.engine import decode_bound
from umim_core.inference.request import Request
from umim_core.inference.sampling import fresh_seed
from umim_core.model.loading import LoadOptions
from umim_core.rules.pruning import check_rule_choice

_log = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its lines are


class RollingTexts:
    """Texts as windows to score, as lm-eval's ``hf`` cuts them.

    Attributes:
        windows: Context and continuation of every window, text by text.
    """

    def __init__(self, texts: Sequence[Sequence[int]], prefix: int, longest: int) -> None:
        self.windows: list[TokenRequest] = []
        self._owners: list[int] = []  # text of each window
        self._scores: list[dict[int, Likelihood]] = [{} for _ in texts]  # by window
        self._left: list[int] = []  # windows of each text without a score
        for number, ids in enumerate(texts):
            pairs = list(get_rolling_token_windows(ids, prefix, longest, 1))
            self.windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            self._owners += [number] * len(pairs)
            self._left.append(len(pairs))

    def add(self, done: Mapping[int, Likelihood]) -> Iterator[tuple[int, Likelihood]]:
        """Take scores of windows; yield number and score of every text that they complete."""
        for window, score in done.items():
            number = self._owners[window]
            self._scores[number][window] = score
            self._left[number] -= 1
            if self._left[number] == 0:
                yield number, self.score(number)

    def score(self, number: int) -> Likelihood:
        """Return the sum over the windows of a text, in their order whatever they came in."""
        scores = [score for _, score in sorted(self._scores[number].items())]
        return Likelihood(
            sum(score.log_prob for score in scores),
            all(score.greedy for score in scores),
            sum((score.sizes for score in scores), Sizes()),
        )


class UmimLM(SizedModel):
    """An lm-eval model that reads compressed inputs.

    Args:
        checkpoint: Embedded name, directory, hub repository, or a loaded checkpoint; by default
            what ``UMIM_CHECKPOINT`` names, else ``default_checkpoint``.
        merge: ``auto`` for what the checkpoint recommends, ``prompt`` (formerly ``context``),
            ``all``, or ``none`` (None, as lm-eval reads it). A baseline takes ``prompt``.
        backbone: Name or directory, if not the one that the checkpoint names; or a loaded one.
        revision: Hub revision of ``backbone``.
        dtype: ``published``, the default, as of ``--model hf``; ``auto`` for the fastest of the
            device, ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: A torch device; by default ``cuda`` where there is one, else ``cpu``.
        batch_size: Requests per forward, or ``auto``.
        max_batch_size: Most requests per forward for ``auto``.
        max_length: Longest input in units (raw tokens if it keeps positions); the backbone's limit.
        add_bos_token: As in ``hf``.
        prefix_token_id: As in ``hf``: stands in for an empty context.
        method: A baseline of ``umim_core.baselines`` that takes the merge module's place.
        match: ``umim``, the default: a baseline has the token reduction of the checkpoint's rules.
        target_tr: Share of each context's tokens that a baseline drops instead; without a baseline
            as in ``UMIM.from_pretrained``: the cheapest rules that save this share.
        allow_backbone_mismatch: Why another backbone than the checkpoint's own is good enough.
        raw_tail: Last tokens of contexts and generation prompts that stay raw; None for what the
            checkpoint recommends together with this ``merge``, else 0.
        protect: Tokens that are never merged, as in ``UMIM.from_pretrained``: ``protect=digits``.
        budget: Largest measured loss of a rule in nats per saved token, as in
            ``UMIM.from_pretrained``.
        compare: ``base`` to run the base model, too; results then have ``NAME_base`` and
            ``NAME_difference`` of every metric, paired by question, with standard errors.

    Raises:
        ConfigError: If ``merge`` or ``method`` is unknown, a method comes with another ``merge``
            than ``prompt``, what needs merging (``raw_tail``, ``compare``, ``target_tr``) with
            ``none``, ``match`` without a method, or ``target_tr`` with ``match``, with ``budget``
            or with a span merger.
        CheckpointError: If the checkpoint cannot be loaded.
        BackboneMismatchError: If the backbone is not the checkpoint's own.
    """

    @one_line_errors()
    @known_arguments
    def __init__(
        self,
        checkpoint: str | Path | Checkpoint | None = None,
        merge: Merge | Literal["auto", "context"] | None = AUTO,
        backbone: str | Backbone | None = None,
        revision: str | None = None,
        dtype: str = PUBLISHED,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        method: str | None = None,
        match: Literal["umim"] | None = None,
        target_tr: float | None = None,
        allow_backbone_mismatch: str | None = None,
        raw_tail: int | None = None,
        compare: Literal["base"] | None = None,
        protect: str | Sequence[str] | None = None,
        budget: float | None = None,
    ) -> None:
        named: dict[str | None, Merge] = {None: "none", "context": "prompt"}
        asked = cast(AskedMerge, named.get(merge, merge))
        rules_tr = target_tr if method is None else None
        check_rule_choice(budget, rules_tr)
        check = partial(check_modes, method, allow_backbone_mismatch, compare, protect, rules_tr)
        check("prompt" if asked == AUTO else asked, raw_tail or 0)  # before anything is read
        self.target = target_of(method, match, target_tr, raw_tail or 0)
        make = None if method is None else BASELINES.find(method)
        checkpoint, self.merge, raw_tail = recommended(
            checkpoint, asked, raw_tail, method, self.target
        )
        check(self.merge, raw_tail)
        merged_model = open_model_args(
            checkpoint,
            self.merge,
            backbone,
            revision,
            dtype,
            device,
            LoadOptions(
                allow_backbone_mismatch=allow_backbone_mismatch,
                protect=protect,
                budget=budget,
                target_tr=rules_tr,
            ),
        ).reading(self.merge, raw_tail)
        self.backbone = merged_model.backbone
        if self.backbone.tokenizer is None:
            raise BackboneError("lm-eval needs a tokenizer", self.backbone.name, "Attach one.")
        super().__init__(
            pretrained=self.backbone.model,
            tokenizer=self.backbone.tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
        )
        self.merged_model, self.method, self.compare = merged_model, method, compare
        self.chats = ChatContexts(self.backbone.tokenizer)
        self._decode_bounds: dict[float | None, None] = {}  # of generated texts, in their order
        self._scored: list[Likelihood] = []  # the latest
        extend_evaluate()
        if make is not None:
            baseline = make(self.backbone, merged_model.require_matcher())
            self.method = named_method(method, baseline.model)
            self.scorer = method_scorer(baseline, merged_model, self.max_length, self.target)
        elif self.merge != "none":
            self.scorer = Scorer(merged_model, self.merge, self.max_length)
        read = self.backbone.name, self.backbone.dtype, self.merge, raw_tail
        _log.info("umim: backbone %s, %s, merge=%s, raw_tail=%d", *read)

    def get_model_info(self) -> dict[str, Any]:
        """Add what was realised to lm-eval's result file (``config.umim``)."""
        bounds = [*self._decode_bounds]  # several where the kwargs of tasks differ
        info: dict[str, Any] = super().get_model_info()
        info["umim"] = {
            **answer_identity(self.merged_model, self.merge, self.method, self.target),
            "decode_max_damage": bounds if len(bounds) > 1 else next(iter(bounds), None),
            **self.realised,
        }
        return info

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Let lm-eval's cache of responses know the answers of this very model only."""
        identity = answer_identity(self.merged_model, self.merge, self.method, self.target)
        reading = {
            "decode_max_damage": self.merged_model.decode_max_damage,
            "max_length": self.max_length,
            "add_bos_token": self.add_bos_token,
            "prefix_token_id": self.prefix_token_id,
            "version": __version__,
        }
        use_own_table(cache_hook, {**identity, **reading}, self.counted)
        super().set_cache_hook(cache_hook)

    def base_model(self) -> UmimLM | None:
        """Return the base model on the same weights with ``compare=base``; else None."""
        if self.compare is None:
            return None
        return UmimLM(
            merge="none",
            backbone=self.backbone,
            batch_size=self.batch_size,
            max_batch_size=self.max_batch_size,
            max_length=self.max_length,
            add_bos_token=self.add_bos_token,
            prefix_token_id=self.prefix_token_id,
        ).sharing_contexts()

    def check_requests(self, requests: Sequence[Instance]) -> None:
        """Refuse texts that are none before the first forward, and a comparison that cannot be."""
        self.check_comparison()
        for request in requests:
            text, *more = request.args  # an answer, or kwargs of generation
            stops = more[0].get("until") if more and isinstance(more[0], dict) else more
            for part in (text, *([stops] if isinstance(stops, str) else stops or ())):
                require(
                    encoding_error(part) is None,
                    CorpusError,
                    "text must not hold lone surrogates",
                    f"{part[:80]!r} of {request.task_name or 'a task'}",
                    "Correct the task's data.",
                )

    def sharing_contexts(self) -> UmimLM:
        """Score answers of one context in one forward, with ``merge=none``, too.

        lm-eval's ``hf`` reads the context once for each answer; log-probabilities are the same but
        for rounding.
        """
        if self.scorer is None:
            self.scorer = Scorer(self.merged_model, "prompt", self.max_length)
        return self

    @one_line_errors()
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Score (context, continuation) texts."""
        self.check_requests(requests)
        self.note_questions(requests)
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        for number, (texts, _, answer) in enumerate(pairs):
            require(
                0 < len(answer) <= self.max_length,
                EvaluationError,
                f"an answer must hold 1 to {self.max_length} tokens",
                f"{len(answer)} tokens of request {number}: {texts[1]!r}",
                "Correct the task's data, or use a backbone with more positions.",
            )
        scores = self._loglikelihood_tokens(pairs, disable_tqdm or bars_are_hidden())
        if self.merge != "none":
            self.count_requests(requests, [score.sizes for score in self._scored])
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

    def _loglikelihood_tokens(
        self,
        requests: Sequence[TokenRequest],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score (strings, context ids, continuation ids); see ``scoring`` for the modes."""
        disable_tqdm = disable_tqdm or bars_are_hidden()  # lm-eval's rolling loop passes False
        if self.scorer is None:
            return cast(
                "list[tuple[float, bool]]",
                super()._loglikelihood_tokens(requests, disable_tqdm, override_bs),
            )

        def keep(done: Mapping[int, Likelihood]) -> None:
            for number, score in done.items():
                if (texts := requests[number][0]) is not None:
                    answer = score.log_prob, score.greedy
                    self.keep_answer("loglikelihood", texts, answer, score.sizes)

        self._scored = self.score_tokens(requests, keep, disable_tqdm, override_bs)
        return [(score.log_prob, score.greedy) for score in self._scored]

    @one_line_errors()
    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts; with ``merge=prompt`` there is no context to compress."""
        self.check_requests(requests)
        if self.merge == "prompt":
            _log.warning("umim: rolling texts are all continuation; merge=all compresses them")
        hidden = disable_tqdm or bars_are_hidden()
        if self.scorer is None:
            return cast("list[float]", super().loglikelihood_rolling(requests, hidden))
        ids = [self.tok_encode(*request.args) for request in requests]
        texts = RollingTexts(ids, self.prefix_token_id, self.max_length)

        def keep(done: Mapping[int, Likelihood]) -> None:
            for number, score in texts.add(done):
                text = requests[number].args
                self.keep_answer("loglikelihood_rolling", text, score.log_prob, score.sizes)

        self.score_tokens(texts.windows, keep, hidden)
        scores = [texts.score(number) for number in range(len(requests))]
        self.count_requests(requests, [score.sizes for score in scores])
        return [score.log_prob for score in scores]

    @one_line_errors()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate until a stop string: prompts compressed; generated tokens with ``merge=all``."""
        self.check_requests(requests)
        disable_tqdm = disable_tqdm or bars_are_hidden()
        self.note_questions(requests)
        scorer = self.scorer or Scorer(self.merged_model, "prompt", self.max_length)
        writer = RowWriter.of(scorer, self.merge)
        seed = None  # drawn when a text is sampled, once for all, so that batches do not matter
        ordered = Collator(
            [(*request.args, number) for number, request in enumerate(requests)],
            sort_fn=lambda args: (-len(self._prompt(args[0])), args[0]),
            group_by="gen_kwargs",
            group_fn=lambda args: args[1],
        )
        longest = max((len(self._prompt(request.args[0])) for request in requests), default=1)
        texts: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating") as bar:
            for chunk in ordered.get_batched(n=self.rows_per_forward(longest)):
                prompts, (options, *_), numbers = zip(*chunk, strict=True)
                wanted = self._wanted(options)
                seed = fresh_seed() if wanted.config.do_sample and seed is None else seed
                request = replace(wanted.request, merge=self.merge, seed=seed, streams=numbers)
                self._note_bound(request)
                ids = [self._prompt(text) for text in prompts]
                asked = [self.asked(text) for text in prompts]
                parts = [self.chats.parts(*pair) for pair in zip(prompts, ids, strict=True)]
                rows = writer.write(ids, wanted, request, asked, parts)
                for prompt, number, row in zip(prompts, numbers, rows, strict=True):
                    text = self.tok_decode(row.ids)
                    text = postprocess_generated_text(text, wanted.until, None)
                    if self.merge == "none":
                        texts.append(text)
                        self.cache_hook.add_partial("generate_until", (prompt, options), text)
                        continue
                    tokens = row.sizes.context_tokens
                    texts.append(GeneratedText.of_row(text, row.output, tokens))
                    self.keep_answer("generate_until", (prompt, options), texts[-1], row.sizes)
                    self.count_requests([requests[number]], [row.sizes])
                bar.update(len(prompts))
        if self.merge != "none":
            self.report()
        return cast("list[str]", ordered.get_original(texts))

    def count_cached(self, request: Instance) -> None:
        """Note the decode bound of a text that was generated before and came from the cache."""
        if request.request_type == "generate_until":
            self._note_bound(replace(self._wanted(request.args[1]).request, merge=self.merge))

    def _note_bound(self, request: Request) -> None:
        if isinstance(self.scorer, Scorer):
            self._decode_bounds[decode_bound(request, self.scorer.merged_model)] = None

    def _wanted(self, options: dict[str, Any]) -> Wanted:
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        settings = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        until, warn = handle_stop_sequences(settings.pop("until"), eos), partial(warning_once, _log)
        return read_gen_kwargs(settings, until, self.backbone, (self.eot_token_id, eos), warn)

    def _prompt(self, text: str) -> np.ndarray:
        ids = self.tok_batch_encode([text])[0][0].tolist() if text else []
        return np.asarray(ids or [self.prefix_token_id], dtype=np.int64)
