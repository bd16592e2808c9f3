"""Recipes of flow ``umim-backbone``: a small causal language model trained from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.corpus import DocstringCorpus, FilesCorpus
from umim_core.config.model_base import Model
from umim_core.config.recipe import Recipe, RunRecipe, TrainConfig
from umim_core.config.recipe_files import read_recipe_file, validated
from umim_core.config.table_recipe import TableRecipe
from umim_core.embedded.docs_tokenizer import ALPHABET_SIZE
from umim_core.text.sources import TokenIds
from umim_core.text.token_ids import MAX_TOKEN_ID

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Size = Annotated[int, Field(ge=1, le=1 << 20)]


class LlamaArchitecture(Model):
    """Rotary positions, grouped queries, tied embeddings."""

    kind: Literal["llama"] = "llama"
    hidden_size: Size
    intermediate_size: Size
    layers: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    max_positions: Size = 2048

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError("kv_heads must divide heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even for rotary positions")
        return self

    def describe(self) -> str:
        """Return the shape in words."""
        return (
            f"Llama-like: size {self.hidden_size}, {self.layers} layers, {self.heads} heads of "
            f"{self.head_dim} ({self.kv_heads} for keys and values), feed-forward size "
            f"{self.intermediate_size}, rotary positions up to {self.max_positions:,}, tied "
            "embeddings"
        )

    def build(self, vocab_size: int, end_of_text: int) -> PretrainedConfig:
        """Return the configuration that transformers builds the model from."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )


class Gpt2Architecture(Model):
    """Learned absolute positions, tied embeddings, no dropout."""

    kind: Literal["gpt2"] = "gpt2"
    hidden_size: Size
    layers: Size
    heads: Size
    max_positions: Size = 1024

    @model_validator(mode="after")
    def _split(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError("heads must divide hidden_size")
        return self

    def describe(self) -> str:
        """Return the shape in words."""
        return (
            f"GPT-2-like: size {self.hidden_size}, {self.layers} layers, {self.heads} heads, "
            f"{self.max_positions:,} learned positions, tied embeddings"
        )

    def build(self, vocab_size: int, end_of_text: int) -> PretrainedConfig:
        """Return the configuration that transformers builds the model from."""
        from transformers import GPT2Config

        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=self.hidden_size,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.max_positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )


Architecture = Annotated[LlamaArchitecture | Gpt2Architecture, Field(discriminator="kind")]


class LanguageModelConfig(TrainConfig):
    """Optimisation of a language model: more decay, on matrices only, and a shorter memory."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    decay_vectors: ClassVar[bool] = False
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-3
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    bf16: bool = Field(
        default=True, description="Run the model's products in bfloat16; weights stay float32."
    )
    sequence_length: Annotated[int, Field(ge=2, description="Tokens predicted per row.")] = 512


class BackboneRecipe(RunRecipe):
    """A backbone: its text, its tokenizer, its shape and its training."""

    kind: Literal["backbone"]
    corpus: Annotated[DocstringCorpus | FilesCorpus, Field(discriminator="kind")]
    vocab_size: Annotated[
        int, Field(gt=ALPHABET_SIZE, le=MAX_TOKEN_ID + 1, description="Entries of the tokenizer.")
    ] = 8192
    architecture: Architecture
    train: LanguageModelConfig

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.train.sequence_length > self.architecture.max_positions:
            raise ValueError("train.sequence_length must fit architecture.max_positions")
        if self.train.batch_size % max(1, self.cluster.workers):
            raise ValueError("cluster.workers must divide train.batch_size")
        if isinstance(self.corpus, FilesCorpus):
            sources = (self.corpus.train, self.corpus.valid, self.corpus.test)
            if any(isinstance(source, TokenIds) for source in sources):
                raise ValueError("a backbone trains its own tokenizer and needs text, not ids")
        return self


def load_any_recipe(path: Path) -> Recipe | BackboneRecipe | TableRecipe | AdaptationRecipe:
    """Read and validate a recipe of any kind, named by its field ``kind``.

    Raises:
        ConfigError: If the file is missing, not YAML, or breaks a rule.
    """
    raw = read_recipe_file(path)
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if kind == "backbone":
        return validated(BackboneRecipe, raw, path.name)
    if kind == "adaptation":
        return validated(AdaptationRecipe, raw, path.name)
    if kind == "table":
        return validated(TableRecipe, raw, path.name)
    return validated(Recipe, raw, path.name)
