"""LLMLingua-2: words that a token classifier would not preserve are deleted.

A worked example, with the budget of 3 of 5 tokens of the text, "?" forced::

    classifier's tokens   the  re  ##port  ends  ?        its own tokenizer
    preserve              .1   .9  .5      .3    .2
    words                 .1   .7          .3    .2       mean of a word's tokens
    text's tokens         the  report      ends  ?        of equal ones the first stay
    kept                       report      ends  ?

Source: Pan et al., "LLMLingua-2: Data Distillation for Efficient and Faithful Task-Agnostic Prompt
Compression" (Findings of ACL 2024). Differences: docs/baselines.md.

Shapes: T tokens of the text, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from huggingface_hub import ResolvedRevision
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.hub import resolve_revision

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import check_complete, freeze, loading
from umim_core.backbone.tokenizer_files import check_place, load_error, load_tokenizer, refuse_code
from umim_core.baselines.forward_cost import forward_flops
from umim_core.baselines.lexical_units import token_texts, words
from umim_core.baselines.methods import BASELINES, OWN_MODELS, Ints, ReducedTokens, Text
from umim_core.baselines.reduction import highest
from umim_core.errors import BackboneError
from umim_core.rules.matcher import Matcher

PUBLISHED: Final = "microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank"
CHUNK: Final = 512  # tokens, special ones included
FORCED: Final = ("\n", "?", ".", "!")
_PRESERVE: Final = 1  # label
_ABOVE_ALL: Final = 2.0  # more than any probability
_WHAT: Final = "token classifier"
_TRAINED: Final = "a trained token classifier"


@dataclass(frozen=True)
class TokenClassifier:
    """A model that gives tokens a probability of being preserved, with its tokenizer.

    Attributes:
        model: A token classifier of two labels; label 1 is to preserve.
        tokenizer: Its tokenizer, a fast one.
        commit: Commit of the hub's repository that it was loaded from; None for a directory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    commit: str | None = None

    @property
    def chunk(self) -> int:
        """Tokens that are read together, special ones included."""
        return min(CHUNK, int(self.model.config.max_position_embeddings))

    @torch.no_grad()
    def preserve(self, text: str, word_ends: Ints) -> NDArray[np.float64]:
        """Return the probability of preserving each word: the mean of its tokens; 0 without any.

        Args:
            text: Any text.
            word_ends: Where its words end, in characters [words] (int64), rising.
        """
        encoded = self.tokenizer(
            text,
            truncation=True,
            max_length=self.chunk,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        sums, counts = np.zeros(len(word_ends)), np.zeros(len(word_ends))
        for ids, places, special in zip(
            encoded["input_ids"],
            encoded["offset_mapping"],
            encoded["special_tokens_mask"],
            strict=True,
        ):
            row = torch.tensor([ids], device=self.model.device)
            logits = self.model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0]
            chances = logits.double().softmax(dim=-1)[:, _PRESERVE].cpu().numpy()
            real = np.array(special) == 0
            last = np.array([end - 1 for _, end in places], dtype=np.int64)[real]
            word = np.minimum(np.searchsorted(word_ends, last, side="right"), len(word_ends) - 1)
            np.add.at(sums, word, chances[real])
            np.add.at(counts, word, 1)
        return np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)


def load_token_classifier(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> TokenClassifier:
    """Load a token classifier with its tokenizer.

    Args:
        name: Directory or hub repository, with safetensors weights.
        revision: Hub revision to pin.
        local_files_only: Whether the network must not be asked.

    Raises:
        BackboneError: If it cannot be loaded, has code of its own, or lacks weights.
    """
    check_place(_WHAT, name, "config.json", revision, local_files_only)
    commit = hub_commit(name, revision, local_files_only=local_files_only)
    revision = commit or revision  # all files of one commit
    try:
        config, _ = PreTrainedConfig.get_config_dict(
            name, revision=revision, local_files_only=local_files_only
        )
        refuse_code(_WHAT, name, config)
        with loading():
            loaded: Any = AutoModelForTokenClassification.from_pretrained(
                name,
                revision=revision,
                output_loading_info=True,
                local_files_only=local_files_only,
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise load_error(_WHAT, name, error) from error
    model: PreTrainedModel
    model, report = loaded
    check_complete(_WHAT, name, report["missing_keys"], _TRAINED)
    tokenizer = load_tokenizer(name, revision=revision, local_files_only=local_files_only)
    return TokenClassifier(freeze(model), tokenizer, commit)


def hub_commit(name: str, revision: str | None, *, local_files_only: bool = False) -> str | None:
    """Return the commit that a revision of a hub's repository is now; None for a directory."""
    found = resolve_revision(name, revision, local_files_only=local_files_only)
    return found.resolved if isinstance(found, ResolvedRevision) else None


@dataclass(frozen=True)
class LLMLingua2:
    """Keep the words that a token classifier would preserve.

    Attributes:
        classifier: Gives the probabilities.
        tokenizer: The tokenizer of the text.
        forced: Tokens of the text that stay before all others, white space around them aside.
    """

    classifier: TokenClassifier
    tokenizer: PreTrainedTokenizerBase
    forced: tuple[str, ...] = FORCED

    def keep(self, text: Text, budget: int) -> Ints:
        """Return the indices [budget] of the tokens that stay; see ``TokenReducer``."""
        texts = token_texts(text.ids, self.tokenizer)
        word_of = words(texts)
        ends = np.cumsum([len(one) for one in texts])
        last = np.flatnonzero(np.diff(word_of, append=word_of[-1] + 1))
        chances = self.classifier.preserve("".join(texts), ends[last])[word_of]
        chances[[self._is_forced(one) for one in texts]] = _ABOVE_ALL
        return highest(chances, text.protected, budget)

    def _is_forced(self, text: str) -> bool:
        return text in self.forced or text.strip(" ") in self.forced

    def flops(self, text: Text, budget: int) -> int:
        """Estimate the classifier's forwards, as if its tokens were as many as the text's."""
        tokens, chunk = len(text.ids), self.classifier.chunk
        return forward_flops(self.classifier.model, tokens, tokens * min(tokens, chunk))


@OWN_MODELS.add("llmlingua2")
def published_classifier() -> str:
    """Return the published token classifier as name@commit.

    Raises:
        BackboneError: If neither the hub nor its cache on this machine knows the commit.
    """
    commit = hub_commit(PUBLISHED, None)
    if commit is None:
        raise BackboneError(
            "the classifier of llmlingua2 must be reachable on the hub, or in its cache here",
            PUBLISHED,
            "Load it once where there is a network.",
        )
    return f"{PUBLISHED}@{commit}"


@BASELINES.add("llmlingua2")
def llmlingua2(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the words that the published token classifier would not preserve."""
    classifier = load_token_classifier(PUBLISHED)
    reducer = LLMLingua2(classifier, backbone.require_tokenizer())
    return ReducedTokens(reducer, f"{PUBLISHED}@{classifier.commit or 'unknown'}")
