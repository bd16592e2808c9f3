"""vLLM reads exported models: merged prompts for unchanged clients, and no span is ever written.

``vllm serve DIR --tokenizer-mode umim`` merges where vLLM turns texts into ids, so stop strings,
bad words and grammars keep the tokenizer's::

    chat      user  Where is the Eiffel Tower?  -> template and replies raw, contents merged
    prompt    a text                            -> merged but for its last 16 tokens
    prompt    ids                               -> as they came

The mask, a logit of -inf for the ids of spans, needs no option, nor do adapters
(``vllm_adapters``): vLLM finds :func:`register` by the entry point ``umim`` of
``vllm.general_plugins``. This module must not load numba: vLLM 0.32's workers on CPU fail where it
is loaded before they start.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final, cast

from transformers import AutoConfig, LlamaConfig, Qwen2Config
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.registry import TokenizerRegistry

from umim_core.errors import ConfigError, UmimError, require
from umim_core.serving.span_files import ARCHITECTURES, RECORD, TYPE, read_record
from umim_core.text.chat_parts import content_places, token_ranges
from umim_core.text.template_process import Chat, Tools

MODE: Final = "umim"  # of --tokenizer-mode
_CHAT: Final = "umim_chat"  # field of a prompt on its way to the tokenizer
_log: Final = logging.getLogger("vllm.umim")


class SpanMask(LogitsProcessor):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's last layer, with -inf for the ids of a model's spans.

    A processor of sampled logits would not do: with speculative decoding vLLM leaves it out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        directory = Path(get_current_vllm_config().model_config.model)
        exported = (directory / RECORD).is_file()
        self.first_span = read_record(directory).vocab_size if exported else None

    def forward(
        self,
        lm_head: Any,
        hidden_states: Any,
        embedding_bias: Any = None,
        skip_gather: bool = False,
    ) -> Any:
        """Return logits [rows, V + K], or this device's part of them with ``skip_gather``."""
        # With LoRA of the head, vLLM calls this on a wrapper of the layer.
        logits = LogitsProcessor.forward(self, lm_head, hidden_states, embedding_bias, skip_gather)
        layer: Any = getattr(self, "base_layer", self)
        first = layer.first_span
        if logits is not None and first is not None:
            before = lm_head.shard_indices.org_vocab_start_index if skip_gather else 0
            logits[..., max(0, first - before) :] = float("-inf")
        return logits


class UmimRenderer(HfRenderer):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's renderer for Hugging Face tokenizers, with merged prompts."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        from umim_core.serving.prompt_merger import PromptMerger

        model = config.model_config
        own, rule = model.tokenizer == model.model, "an exported model needs its own tokenizer"
        require(own, ConfigError, rule, model.tokenizer, "Drop --tokenizer.")
        self._merger = PromptMerger.load(Path(model.model))
        super().__init__(config, tokenizer)

    def render_messages(self, messages: Any, params: Any) -> tuple[Any, Any]:
        """Return a conversation and its prompt, which remembers the conversation."""
        conversation, prompt = super().render_messages(messages, params)
        return conversation, self._remembering(prompt, conversation, params)

    async def render_messages_async(self, messages: Any, params: Any) -> tuple[Any, Any]:
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, self._remembering(prompt, conversation, params)

    def _remembering(self, prompt: Any, conversation: Chat, params: Any) -> Any:
        """Return a chat's prompt with what its places are found by, unless it is ids already."""
        options = {**params.get_apply_chat_template_kwargs(), "tokenize": False}

        def render(chat: Chat, tools: Tools | None) -> str:
            tokenizer, messages = self.get_tokenizer(), [dict(message) for message in chat]
            chosen = options if tools is None else options | {"tools": tools}
            return cast(
                str, safe_apply_chat_template(self.model_config, tokenizer, messages, **chosen)
            )

        chat = conversation, render, options.get("tools")
        return {**prompt, _CHAT: chat} if "prompt" in prompt else prompt

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        """Return a prompt's ids, merged; vLLM runs this in a thread.

        Prompts with images and the like stay raw, and so do those of clients that ask for the
        places of tokens or let vLLM cut the prompt.
        """
        chat = prompt.pop(_CHAT, None)
        if (
            params.return_token_offsets
            or params.truncate_prompt_tokens is not None
            or prompt.get("multi_modal_data")
            or prompt.get("multi_modal_uuids")
        ):
            return super()._tokenize_prompt(prompt, params)
        text = prompt["prompt"]
        # vLLM would cut a raw prompt beyond the context here; merged, it may fit.
        encoded = self.get_tokenizer()(
            text,
            add_special_tokens=params.add_special_tokens,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = encoded["input_ids"]
        try:
            ranges = None
            if chat is not None:
                conversation, render, tools = chat
                places = content_places(conversation, text, render, tools, self._merger.roles)
                ranges = token_ranges(encoded["offset_mapping"], places)
            ids = self._merger.merge(ids, ranges)
        except (UmimError, VLLMValidationError) as error:  # a template that takes no other contents
            _log.warning("a prompt stays raw: %s", error)
        return self._build_tokens_prompt(ids, prompt)


class UmimLlamaConfig(LlamaConfig):  # type: ignore[no-untyped-call]  # theirs
    model_type = TYPE.format(LlamaConfig.model_type)


class UmimQwen2Config(Qwen2Config):  # type: ignore[no-untyped-call]  # theirs
    model_type = TYPE.format(Qwen2Config.model_type)


def register() -> None:
    """Add the mode, the mask and models with adapters to vLLM, in each of its processes."""
    TokenizerRegistry.register(MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
    RENDERER_REGISTRY.register(MODE, __name__, UmimRenderer.__name__)
    LogitsProcessor.register_oot(SpanMask)
    for config in (UmimLlamaConfig, UmimQwen2Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for architecture in ARCHITECTURES.values():
        ModelRegistry.register_model(
            architecture, f"umim_core.serving.vllm_adapters:{architecture}"
        )
