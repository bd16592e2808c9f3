"""Tiny random language models of every family: one set of sizes, and what a test changes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from umim_core.backbone.backbone import Backbone, wrap_backbone

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "phi", "gpt-neox", "gpt2", "gpt-neo")
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: Final = {"num_key_value_heads": 2}
# What a family needs besides; 0 stands for the number of positions.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 0},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 0},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 24},
}


def tiny_config(family: str = "llama", **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a family; sizes have the names that Llama gives them."""
    family = family.replace("-", "_")
    settings = SIZES | _OWN.get(family, {}) | changes
    for window in ("sliding_window", "window_size"):
        if settings.get(window) == 0:
            settings[window] = settings["max_position_embeddings"]
    return AutoConfig.for_model(family, **settings)


def random_model(
    config: PreTrainedConfig, seed: int = 0, attention: str | None = None
) -> PreTrainedModel:
    """Return a model of random weights; the global generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def tiny_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Return a fresh model of a family whose texts end with id 0."""
    return random_model(tiny_config(family, eos_token_id=0), seed)


def random_backbone(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    attention: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **changes: Any,
) -> Backbone:
    model = random_model(tiny_config(family, **changes), seed, attention)
    return wrap_backbone(model.to(dtype), tokenizer)


def written_by_transformers(
    model: PreTrainedModel, prompt: Sequence[int] | np.ndarray, new: int, **options: Any
) -> list[int]:
    """The ids that transformers' ``generate`` writes behind the ids of one prompt."""
    ids = torch.tensor(prompt)[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, pad_token_id=0, **options
    )
    return out[0, ids.shape[1] :].tolist()


@contextmanager
def forwards_of(trunk: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Rows and units of each forward on embeddings within, also while they are noted."""
    seen: list[tuple[int, ...]] = []
    hook = trunk.register_forward_pre_hook(
        lambda _, __, given: seen.append(tuple(given["inputs_embeds"].shape[:2])), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


def word_tokenizer(
    words: Sequence[str], split: pre_tokenizers.PreTokenizer | None = None, **special: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words; ``<eos>`` is all special tokens, unless some are named."""
    special = special or dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<eos>")
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    backend.pre_tokenizer = split or pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level_bpe(
    texts: Iterable[str], size: int, special: Sequence[str], alphabet: Sequence[str] | None = None
) -> Tokenizer:
    """Train a BPE of about ``size`` tokens on texts, over all bytes or some of them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=alphabet or pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per letter; the last id ends a text."""
    vocabulary = {letter: i for i, letter in enumerate([*letters, "[UNK]", "</s>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>")
