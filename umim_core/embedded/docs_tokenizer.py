"""Training of the byte-level BPE that both embedded backbones share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from umim_core.errors import ConfigError

END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TEXT_ID: Final = 0  # the first entry of every tokenizer trained here
ALPHABET_SIZE: Final = 256  # one entry per byte, so that no text is out of vocabulary


def train_tokenizer(
    texts: Iterable[str],
    out: Path,
    vocab_size: int = 8192,
    *,
    max_positions: int = 2048,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE and save it as `AutoTokenizer` loads it.

    The same texts in any order give the same merges, hence the same files.

    Args:
        texts: Training texts.
        out: Folder that receives ``tokenizer.json`` and ``tokenizer_config.json``.
        vocab_size: Entries in all: ``<|endoftext|>`` (id 0), the 256 bytes, then the merges. Fewer
            come out when the texts hold too few distinct pairs.
        max_positions: Positions of the backbone, the tokenizer's ``model_max_length``.

    Returns:
        The tokenizer that was saved.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes and the special token.
    """
    if vocab_size < ALPHABET_SIZE + 1:
        raise ConfigError(
            f"vocab_size must be at least {ALPHABET_SIZE + 1} (256 bytes and {END_OF_TEXT})",
            vocab_size,
            "The embedded backbones use 8192.",
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # transformers leaves this constructor without annotations.
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=None,
        model_max_length=max_positions,
    )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    return tokenizer
