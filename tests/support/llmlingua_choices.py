"""Choices of package llmlingua 0.2.2 on fixed inputs: ``tests/baselines/llmlingua_choices.json``.

`python -m tests.support.llmlingua_choices` writes the file again and needs the package (it is not a
requirement of UMIM). Its own code chooses; the models that it would load are replaced by the inputs
that the tests have, too:

- LLMLingua: the loss of a token is a number drawn for it and the token before it;
- LLMLingua-2: a random BERT of two layers, weights drawn by numpy, and counts of tokens of
  ``umim-docs-llama`` in place of OpenAI's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from umim_core.backbone.model_files import freeze
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.llmlingua2 import TokenClassifier
from umim_core.baselines.methods import Ints

CHOICES: Final = Path(__file__).parents[1] / "baselines" / "llmlingua_choices.json"
TOKENIZER: Final = "umim-docs-llama"
ROOM: Final = 32  # tokens of a chunk, special ones included
_LOSSES: Final = ((60, 200), (150, 200), (199, 200), (200, 200), (430, 200), (700, 200), (300, 50))
_SHARES: Final = (0.35, 0.8)
_RATES: Final = (0.3, 0.5, 0.8)
_WORDS: Final = ("the", "a", "of", "in", "and", "sort", "array", "value", "interpolator")
_PIECES: Final = (*_WORDS, "perpendicular", "##s", "##ed", *".,()?-:")
_LONG: Final = (
    "the interpolator perpendicular(a) sorted array, and the values of the arrays in the sort. "
    "interpolators of a value sort the value: perpendicular?"
)
TEXTS: Final = ("the array of values, sorted.", _LONG, " ".join([_LONG] * 3))


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


def _losses() -> list[dict[str, Any]]:
    from llmlingua import PromptCompressor

    made = []
    for tokens, segment in _LOSSES:
        losses = torch.from_numpy(pair_losses(tokens))

        def read(text: str, kind: str, ids: Any, mask: Any, losses: Any = losses, **of: Any) -> Any:
            past, end = of["past_key_values"], of["end"] or ids.shape[1]
            row = ids[0, 0 if past is None else past[0][0].shape[2] : end]
            return losses[row[:-1], row[1:]], [[torch.zeros(1, 1, end, 1)] * 2]

        def encode(text: str, return_tensors: str | None = None, **of: Any) -> Any:
            row = [int(one) for one in text.split()]
            if return_tensors is None:
                return SimpleNamespace(input_ids=row)
            return {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))}

        package = object.__new__(PromptCompressor)
        package.tokenizer, package.get_ppl, package.device = encode, read, "cpu"
        package.max_position_embeddings, package.cache_bos_num = 10**6, 10
        for share in _SHARES:
            budget = int(share * tokens)
            context = [" ".join(map(str, range(tokens)))]
            kept, _ = package.iterative_compress_prompt(
                context, budget, iterative_size=segment, dynamic_ratio=[0.0]
            )
            dropped = sorted(set(range(tokens)) - set(kept[0].tolist()))
            case = {"tokens": tokens, "segment": segment, "budget": budget, "dropped": dropped}
            made.append(case)
    return made


def _words() -> list[dict[str, Any]]:
    from llmlingua import PromptCompressor

    classifier, counted = piece_classifier(), load_tokenizer(TOKENIZER)

    def encode(text: str) -> list[int]:
        return counted.encode(f" {text}" if text[0].isalnum() else text, add_special_tokens=False)

    made = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "bert-base-multilingual-cased"
        classifier.model.save_pretrained(place)
        classifier.tokenizer.save_pretrained(place)
        package = object.__new__(PromptCompressor)
        package.model_name, package.oai_tokenizer = str(place), SimpleNamespace(encode=encode)
        package.load_model(str(place), "cpu", {"trust_remote_code": False})
        package.init_llmlingua2()
        package.max_seq_len = ROOM
        for text in TEXTS:
            for rate in _RATES:
                found = package.compress_prompt_llmlingua2(
                    [text], rate=rate, return_word_label=True, word_sep="\n"
                )
                labels = [
                    line.split(" ") for line in found["fn_labeled_original_prompt"].split("\n")
                ]
                kept = [[word, int(label)] for word, label in labels]
                made.append({"text": text, "rate": rate, "words": kept})
    return made


def main() -> int:
    found = {"package": "llmlingua 0.2.2", "losses": _losses(), "words": _words()}
    CHOICES.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
