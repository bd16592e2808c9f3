"""Model card of a backbone: architecture, training, measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping

from umim_core.backbone.backbone import Backbone
from umim_core.config.backbone_recipe import BackboneRecipe
from umim_core.embedded.docs_tokenizer import END_OF_TEXT
from umim_core.evaluation.language_model import LanguageModelScore

_HEADER = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
"""
_DOCSTRINGS = (
    "Docstrings of the installed Python stack "
    "(`umim_core/embedded/docstring_corpus.py`): repeated\n"
    "paragraphs dropped, split by the hash of the module path (92 % train, 4 % valid, 4 % test).\n"
    "networkx, sympy and the standard library are left out; they are the out-of-domain corpora."
)
_FILES = "The files that the recipe names; repeated text is not dropped."


def backbone_card(
    recipe: BackboneRecipe,
    backbone: Backbone,
    training: str,
    scores: Mapping[str, LanguageModelScore],
) -> str:
    """Render the card.

    Args:
        recipe: What the backbone was, or can be, trained with.
        backbone: The model as published.
        training: Paragraphs about how it was trained.
        scores: What was measured, by split.

    Returns:
        Markdown with the header that the Hugging Face hub reads.
    """
    weights = sum(parameter.numel() for parameter in backbone.model.parameters())
    entries = len(backbone.require_tokenizer())
    rows = "\n".join(_row(split, score) for split, score in scores.items())
    return f"""{_HEADER}
# {recipe.name}

A small causal language model of technical English, trained from nothing as a frozen backbone for
UMIM. It writes plausible docstrings; it knows nothing else and answers no questions.

- Architecture: {recipe.architecture.describe()}.
- Parameters: {weights:,}, bfloat16 safetensors ({2 * weights / 1e6:.1f} MB).
- Tokenizer: byte-level BPE with {entries:,} entries, trained on the same text; `{END_OF_TEXT}`
  stands between documents.

## Data

{_DOCSTRINGS if recipe.corpus.kind == "docstrings" else _FILES}

## Training

{training}

## Measured

Whole held-out splits; every token and every document's end is predicted once, in windows of
{recipe.train.sequence_length} tokens; bfloat16 weights, float32 arithmetic. Bits per byte are
total nats / ln 2 / UTF-8 bytes.

| split | documents | tokens | bytes | nats per token | perplexity | bits per byte |
|---|---|---|---|---|---|---|
{rows}

## Rebuild

```
python -m flows run {recipe.name}
```

runs flow `umim-backbone` from a checkout: corpus, tokenizer, token ids, training, this card.

## Licence

Apache-2.0. The training text belongs to its packages, under their own licences, and is not
included.
"""


def describe_training(
    recipe: BackboneRecipe, summary: Mapping[str, float], corpus_tokens: int
) -> str:
    """Say how a run of the flow trained its model."""
    config = recipe.train
    steps = int(summary["steps"])
    tokens = steps * config.batch_size * config.sequence_length
    arithmetic = "bfloat16 autocast" if config.bf16 else "float32"
    return (
        f"{steps:,} steps of {config.batch_size} rows of {config.sequence_length} tokens: "
        f"{tokens:,} tokens, of {corpus_tokens:,} in the training split. AdamW {config.betas}, "
        f"learning rate {config.learning_rate:g} with linear warm-up and decay, weight decay "
        f"{config.weight_decay:g} on matrices, gradients clipped to {config.clip_norm:g}, "
        f"{arithmetic}, seed {recipe.seed}. The weights are those of step "
        f"{int(summary['best_step']):,}, the best on {config.validation_rows} validation rows "
        f"({summary['best_score']:.3f} nats per token)."
    )


def _row(split: str, score: LanguageModelScore) -> str:
    return (
        f"| {split} | {score.documents:,} | {score.targets:,} | {score.bytes:,} | "
        f"{score.nats_per_token:.3f} | {math.exp(score.nats_per_token):.1f} | "
        f"{score.bits_per_byte:.3f} |"
    )
