"""Inputs of package llmlingua 0.2.2: ``tests/baselines/llmlingua_choices.json`` has its choices.

The package's own code chose; the models that it would load were replaced by these
(``git show ea8ed576:tests/support/llmlingua_choices.py`` wrote the file):

- LLMLingua: the loss of a token is a number drawn for it and the token before it;
- LLMLingua-2: a random BERT of two layers, weights drawn by numpy, and counts of tokens of
  ``umim-docs-llama`` in place of OpenAI's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from umim_core.backbone.model_files import freeze
from umim_core.baselines.llmlingua2 import TokenClassifier
from umim_core.baselines.methods import Ints

CHOICES: Final = Path(__file__).parents[1] / "baselines" / "llmlingua_choices.json"
TOKENIZER: Final = "umim-docs-llama"
ROOM: Final = 32  # tokens of a chunk, special ones included
_WORDS: Final = ("the", "a", "of", "in", "and", "sort", "array", "value", "interpolator")
_PIECES: Final = (*_WORDS, "perpendicular", "##s", "##ed", *".,()?-:")


def pair_losses(tokens: int) -> NDArray[np.float64]:
    """The loss of every token behind every other [T, T]."""
    return np.random.default_rng(tokens).uniform(0.1, 9.0, (tokens, tokens))


class PairLosses:
    """Losses of tokens after kept ones, in the place of ``CompressedPrefix``."""

    def __init__(self, tokens: int) -> None:
        self._losses, self._last = pair_losses(tokens), 0

    def score(self, segment: Ints) -> NDArray[np.float64]:
        return self._losses[np.concatenate([[self._last], segment[:-1]]), segment]

    def append(self, ids: Ints) -> None:
        self._last = int(ids[-1])


def piece_classifier() -> TokenClassifier:
    """A BERT of drawn weights whose words have pieces, as multilingual BERT's have."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    core = Tokenizer(
        WordPiece({piece: n for n, piece in enumerate([*special, *_PIECES])}, unk_token="[UNK]")
    )
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name[1:-1].lower()}_token": name for name in special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=ROOM,
        num_labels=2,
    )
    model, rng = BertForTokenClassification(config), np.random.default_rng(0)
    for _, weight in sorted(model.named_parameters()):
        weight.data = torch.from_numpy(rng.normal(0, 0.5, weight.shape)).float()
    return TokenClassifier(freeze(model), tokenizer)
