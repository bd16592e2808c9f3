"""The public model: a frozen backbone with its rules and merge module."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge, check_merge
from umim_core.errors import EvaluationError, GenerationError, require
from umim_core.inference.batch import Batch, exhaust
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import GenerationState, Prefix, Row
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import finite_sum, token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.model.compression import Compression
from umim_core.model.generation_output import GenerationOutput
from umim_core.model.hub import upload_checkpoint
from umim_core.model.inputs import (
    Item,
    Mask,
    PromptInput,
    encode_prefix,
    encode_prompts,
    is_list,
    prompt_items,
    warn_of_padding,
)
from umim_core.model.loading import LoadOptions, check_load_options, find_both
from umim_core.rules.leaks import LeakPolicy, check_export
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.scratch import scratch_folder
from umim_core.text.roles import Role
from umim_core.text.template_process import Tools
from umim_core.text.text_stream import TextStream
from umim_core.text.token_ids import decode

_CONTEXTS_AT_ONCE: Final = 16  # their mask grows with the square of the longest


class UMIM:
    """A frozen language model that reads merged spans as single embeddings.

    Several threads may generate with one object at once, each its own prompts, and continue one
    prefix or state. Every call gives what it would give alone, but samples without a seed draw from
    torch's global generator, in whatever order calls reach it.

    A checkpoint has the module and the rules that belong to a backbone; the reason why another one
    is good enough (``allow_backbone_mismatch``) is recorded in what is saved.

    Attributes:
        backbone: The frozen model and its tokenizer.
        module: The merge module, on the backbone's device.
        rules: The merge rules.
        matcher: Their matcher.
        merged_model: All of these as one value, which evaluations take.
        engine: The generation engine.

    Raises:
        BackboneMismatchError: If the checkpoint belongs to another backbone.
        TokenizerMismatchError: If its rules belong to another tokenizer.
    """

    def __init__(
        self,
        backbone: Backbone,
        checkpoint: Checkpoint,
        *,
        allow_backbone_mismatch: str | None = None,
    ) -> None:
        if allow_backbone_mismatch is None:
            checkpoint.check_backbone(backbone)
        else:
            checkpoint = checkpoint.noting(backbone, allow_backbone_mismatch)
        self.backbone = backbone
        self.checkpoint = checkpoint
        # float64 keeps its precision; narrower backbones keep a float32 module.
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        # A copy: the checkpoint may serve other backbones, of other types and devices.
        module: MergeModule = deepcopy(checkpoint.module).to(backbone.device, dtype)
        self.module = module.eval().requires_grad_(False)
        self.rules: RuleSet = checkpoint.rules
        self.matcher = Matcher(self.rules)
        bound = checkpoint.config.decode_max_damage
        self.merged_model = MergedModel(
            backbone, self.module, self.matcher, decode_max_damage=bound
        )
        self.engine = Engine(self.merged_model)

    def __repr__(self) -> str:
        return f"UMIM({self.backbone!r}, {self.checkpoint.config.form()}, {self.rules!r})"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The backbone's tokenizer; None where it has none."""
        return self.backbone.tokenizer

    @classmethod
    def from_pretrained(
        cls, name: str | Path | Checkpoint | None = None, **options: Unpack[LoadOptions]
    ) -> UMIM:
        """Load a merge checkpoint and the backbone it belongs to: the one way to open it.

        Args:
            name: ``umim-docs-llama``, ``umim-docs-gpt2``, a checkpoint directory, a name that
                `umim path` lists or a hub repository (``owner/name``); or a loaded checkpoint. By
                default ``umim-smollm2-135m-adapters``, or ``umim-docs-llama`` where its backbone
                cannot be fetched; ``umim-smollm2-135m`` is of the paper's form.
            **options: See ``LoadOptions``.

        Raises:
            CheckpointError: If there is no such checkpoint, or it is malformed.
            ArtifactError: If its files were altered.
            BackboneError: If the backbone cannot be loaded, or options do not go together.
            BackboneMismatchError: If the backbone is not the checkpoint's.
            TokenizerMismatchError: If the tokenizer is not the rules'.
        """
        check_load_options(options)
        backbone, checkpoint = find_both(name, options)
        reason = options.get("allow_backbone_mismatch")
        return cls(backbone, checkpoint, allow_backbone_mismatch=reason)

    def generate(
        self,
        prompts: PromptInput | None = None,
        options: GenerateOptions | None = None,
        *,
        past: GenerationState | None = None,
        input_ids: PromptInput | None = None,
        attention_mask: Mask | None = None,
        add_special_tokens: bool | None = None,
        tools: Tools | None = None,
        **changes: Any,
    ) -> GenerationOutput:
        """Generate a continuation of each prompt.

        The options that are used most: ``max_new_tokens`` (the model's, else 64), ``do_sample``,
        ``temperature``, ``top_p``, ``seed``, ``stop_strings``; ``merge`` (``prompt``, ``all`` or
        ``none``), ``raw_tail`` and ``roles``, by default as the checkpoint recommends.

        Args:
            prompts: One text, chat (messages of role and content) or sequence of ids, or several; a
                tensor of ids; a tokenizer's output. With ``past`` only what is added; but a chat is
                the whole conversation.
            options: All of them: ``umim_core.config.generation.PlainOptions`` says what they mean.
            past: State of an earlier output, or what ``prefix`` returns, to go on from.
            input_ids: transformers' name of the prompts: ``generate(**tokenizer(text))``.
            attention_mask: 1 where the ids of prompts count, 0 at padding (all count).
            add_special_tokens: Whether texts get special tokens, a BOS say (as the tokenizer does
                by default, and none behind ``past``). Chats never get any: their template writes
                them.
            tools: Schemas of the functions that a chat may call, which its template writes.
            **changes: Options by name.

        Returns:
            One entry per prompt and sample in every field; one text counts as a batch of one.

        Raises:
            GenerationError: If a prompt has no token, an option is out of range, or the backbone's
                positions do not suffice.
        """
        chosen = GenerateOptions.of(options, changes)
        items = self._items(prompts, input_ids, attention_mask)
        return exhaust(self._steps(items, chosen, past, add_special_tokens, tools))

    def stream(
        self,
        prompt: PromptInput | None = None,
        options: GenerateOptions | None = None,
        *,
        past: GenerationState | None = None,
        input_ids: PromptInput | None = None,
        attention_mask: Mask | None = None,
        add_special_tokens: bool | None = None,
        tools: Tools | None = None,
        **changes: Any,
    ) -> Generator[str, None, GenerationOutput]:
        """Generate a continuation of one text, chat or ids and yield its text as it comes.

        Everything else is as in ``generate``.

        Yields:
            Its parts; together they are the generated text.

        Returns:
            What ``generate`` returns.

        Raises:
            GenerationError: As ``generate``, or if there is more than one row.
        """
        chosen = GenerateOptions.of(options, changes)
        text = TextStream(partial(decode, self.backbone.require_tokenizer()))
        items = self._items(prompt, input_ids, attention_mask)
        steps = self._steps(items, chosen, past, add_special_tokens, tools, one_row=True)
        while True:
            try:
                rows = next(steps)
            except StopIteration as end:
                if piece := text.finish():
                    yield piece
                output: GenerationOutput = end.value
                return output
            if piece := text.push(rows[0].raw[-1]):
                yield piece

    def prefix(
        self,
        text: PromptInput,
        *,
        merge: Merge | None = None,
        raw_tail: int = 0,
        add_special_tokens: bool | None = None,
        tools: Tools | None = None,
        roles: Sequence[Role] | None = None,
    ) -> Prefix:
        """Read a text once, for any number of prompts that go on from it.

        ``generate(questions, past=prefix)`` takes it for all of its prompts, any number of times,
        and copies nothing until it writes. A question that is a chat is the whole conversation, as
        with a state.

        Args:
            text: A text, ids, or a chat, which is read up to the end of its last message's content.
            merge: What is merged, ``none`` or spans of the text; as the checkpoint recommends.
            raw_tail: Last tokens that stay raw; 0, since the text is not the end of a prompt.
            add_special_tokens: Whether a text gets special tokens; None does as the tokenizer does.
            tools: Schemas of the functions that a chat may call.
            roles: Whose contents of a chat may merge; as the checkpoint recommends.

        Raises:
            ConfigError: If ``merge`` or a role is unknown, or ``raw_tail`` is negative or has no
                effect.
            GenerationError: If the text is empty or does not fit the backbone's positions.
        """
        given = GenerateOptions(merge=merge, raw_tail=raw_tail, roles=roles)
        options, merging = self._recommended(given)
        ids = encode_prefix(text, self.backbone, add_special_tokens, tools, merging)
        return self.engine.prefix(ids, options)

    def _recommended(self, options: GenerateOptions) -> tuple[GenerateOptions, Sequence[Role]]:
        """Return options with what the checkpoint recommends, and the roles that merge.

        A bound on prices while decoding implies ``merge="all"``.
        """
        config = self.checkpoint.config
        merge, raw_tail = config.recommended(options.merge, options.raw_tail)
        if options.merge is None and options.decode_max_damage is not None:
            merge = "all"
        roles = config.roles if options.roles is None else options.roles
        return replace(options, merge=merge, raw_tail=raw_tail), roles

    def _items(
        self, prompts: PromptInput | None, input_ids: PromptInput | None, mask: Mask | None
    ) -> list[Item]:
        items = prompt_items(prompts, input_ids, mask)
        if mask is None and not isinstance(prompts, Mapping):
            warn_of_padding(items, self.backbone)
        return items

    def _steps(
        self,
        items: Sequence[Item],
        options: GenerateOptions,
        past: GenerationState | None,
        add_special_tokens: bool | None,
        tools: Tools | None,
        one_row: bool = False,
    ) -> Generator[list[Row], None, GenerationOutput]:
        known = past is None or isinstance(past, GenerationState)
        rule = "past must be a state or a prefix"
        remedy = "Pass output.state, or what umim.prefix returned."
        require(known, GenerationError, rule, type(past).__name__, remedy)
        options, roles = self._recommended(options.of_model(self.backbone))
        rows = len(items) * options.samples
        rule, remedy = "a stream is of one row", "Stream one prompt and one sample."
        require(not one_row or rows <= 1, GenerationError, rule, f"{rows} rows", remedy)
        past = past and past.for_turn(len(items), self.merged_model)
        encoded = encode_prompts(items, self.backbone, past, add_special_tokens, tools, roles)
        generation = yield from Batch(self.engine).run(encoded, options, past)
        reasons = tuple(prompt.unmerged for prompt in encoded)
        return GenerationOutput(**vars(generation), backbone=self.backbone, unmerged=reasons)

    @torch.no_grad()
    def score(
        self,
        contexts: Sequence[str],
        continuations: Sequence[Sequence[str]],
        *,
        merge: Merge = "all",
        raw_tail: int = 0,
        add_special_tokens: bool | None = None,
    ) -> list[list[float]]:
        """Score continuations after compressed contexts, those of a context together if they fit.

        Args:
            contexts: Texts with at least one token each.
            continuations: Texts per context, encoded on their own; they stay raw.
            merge: ``none`` gives the base model's scores.
            raw_tail: Last tokens of each context that stay raw.
            add_special_tokens: Whether contexts get special tokens, a BOS say; None does as the
                tokenizer does by default.

        Returns:
            Per context, the log-probability of each continuation (summed over its tokens, nats).

        Raises:
            ConfigError: If ``merge`` is unknown, or ``raw_tail`` is negative or has no effect.
            EvaluationError: If a context or a continuation has no token, the numbers of contexts
                and lists differ, or the backbone's positions do not suffice.
            GenerationError: If a row of preserved positions exceeds a sliding window.
            NumericalError: If a log-probability is NaN or infinite.
        """
        model, encode = self.merged_model.reading(merge, raw_tail), self.backbone.encode
        lists = all(map(is_list, (contexts, continuations))) and all(map(is_list, continuations))
        rule = "contexts are a list of texts, continuations a list of such lists"
        found = f"{type(contexts).__name__}, {type(continuations).__name__}"
        require(lists, EvaluationError, rule, found, "Put it into a list.")
        equal = len(contexts) == len(continuations)
        rule = "every context needs its continuations"
        found = f"{len(contexts)} contexts, {len(continuations)} lists"
        require(equal, EvaluationError, rule, found, "Pass one list per context.")
        scored: list[list[float]] = []
        for first in range(0, len(contexts), _CONTEXTS_AT_ONCE):
            part = slice(first, first + _CONTEXTS_AT_ONCE)
            rows = score_continuations(
                [np.array(encode(text, add_special_tokens), np.int64) for text in contexts[part]],
                [[np.array(encode(text), np.int64) for text in row] for row in continuations[part]],
                model,
            )
            scored += [[finite_sum(scores.log_probs) for scores in row] for row in rows]
        return scored

    def compress(
        self, text: str, *, raw_tail: int = 0, add_special_tokens: bool | None = None
    ) -> Compression:
        """Cut a text, which may be empty, into units, as a prompt would be.

        Its last ``raw_tail`` tokens stay raw: none, whatever the checkpoint recommends, since the
        text need not be a prompt. Special tokens are added as the tokenizer does where nothing is
        said.

        Raises:
            ConfigError: If ``raw_tail`` is negative.
        """
        ids = self.backbone.encode(text, add_special_tokens)
        return Compression.of(ids, self.matcher, self.backbone.decode, raw_tail)

    def perplexity(
        self,
        texts: str | Sequence[str] | Sequence[NDArray[np.integer]],
        *,
        merge: Merge = "all",
        add_special_tokens: bool | None = None,
    ) -> float:
        """Compute token-level perplexity over all raw targets, each in the state before it.

        It is exp(mean negative log-probability per target).

        Args:
            texts: Texts, or arrays of raw ids [T_b]; each is scored on its own, in one forward.
            merge: ``all``, or ``none`` for the base model's perplexity; a text has no prompt.
            add_special_tokens: Whether texts get special tokens; None does as the tokenizer does.

        Raises:
            EvaluationError: If there is no target or a text exceeds the backbone's positions.
            GenerationError: If a text exceeds the window of a sliding-window backbone.
            NumericalError: If a log-probability is NaN or infinite.
        """
        check_merge(merge, ("all", "none"))
        model = self.merged_model.base() if merge == "none" else self.merged_model
        items: Any = [texts] if isinstance(texts, str) else texts
        items = items.numpy(force=True) if isinstance(items, torch.Tensor) else items
        several = is_list(items) or isinstance(items, np.ndarray)
        rule, remedy = "perplexity is of a text, or of a list of them", "Put it into a list."
        require(several, EvaluationError, rule, type(texts).__name__, remedy)
        total, targets = 0.0, 0
        for item in items:
            ids: object = item
            if isinstance(item, str):
                ids = self.backbone.encode(item, add_special_tokens)
            (scores,) = token_log_probs([np.array(ids)], model)
            total += finite_sum(scores)
            targets += len(scores)
        rule = "perplexity needs at least two tokens"
        require(targets > 0, EvaluationError, rule, f"{len(texts)} texts", "Pass longer ones.")
        return float(np.exp(-total / targets))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write module and rules as they are, and the backbone's name alone, to a new directory.

        Raises:
            ArtifactError: If it exists or cannot be written.
        """
        self.checkpoint.with_contents(self.module, self.rules).save(directory)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        commit_message: str = "Upload checkpoint",
        leaks: LeakPolicy = "refuse",
    ) -> str:
        """Upload module, rules and the backbone's name to ``owner/name``, made if need be.

        Rules that spell out addresses or keys are published only where ``leaks`` is ``allow``.

        Returns:
            The address of the commit.

        Raises:
            LeakError: If the rules leak and ``leaks`` is ``refuse``.
            CheckpointError: If the hub refuses or cannot be reached.
        """
        check_export(self.rules, self.backbone.require_tokenizer(), leaks)
        with scratch_folder(Path(gettempdir()), "umim-push") as parent:
            directory = parent / "checkpoint"
            self.save_pretrained(directory)
            return upload_checkpoint(directory, repo_id, private, commit_message)
