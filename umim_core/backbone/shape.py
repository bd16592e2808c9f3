"""Shape of a backbone: the sizes that its memory and time follow from, without its weights.

Symbols: d hidden size, f feed-forward size, l layers, h heads of size k, g heads of keys and
values, V vocabulary. Biases, norms and position tables, under 0.2 % of the weights, are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from umim_core.errors import BackboneError, ConfigError, require
from umim_core.store.artifacts import described

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

Size = Annotated[int, Field(ge=1, le=1 << 24)]
# The families whose configuration tells the shape, and whether their feed-forward part has a gate.
_GATED_MLP: Final = {
    "llama": True,
    "mistral": True,
    "qwen2": True,
    "qwen3": True,
    "gpt2": False,
    "gpt_neo": False,
    "gpt_neox": False,
    "phi": False,
}
_STATE: Final = "State it in hardware.shapes."


class BackboneShape(BaseModel):
    """Architecture of a causal language model.

    Attributes:
        gated_mlp: Whether the feed-forward part has a gate, as in the Llama family, which also has
            RMS norms; without one it is like GPT-2's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hidden_size: Size
    """Dimensions of an embedding."""
    intermediate_size: Size
    """Dimensions inside the feed-forward part."""
    layers: Size
    """Transformer blocks."""
    heads: Size
    """Query heads of a layer."""
    kv_heads: Size
    """Key and value heads of a layer; they divide the query heads."""
    head_dim: Size
    """Dimensions of a head."""
    vocab_size: Size
    """Rows of the embedding matrix."""
    tied: bool
    """Whether the head is the embedding matrix."""
    gated_mlp: bool
    """Whether the feed-forward part has a gate."""

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError("kv_heads must divide heads")
        return self

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Self:
        inner = config.get_text_config()
        rule = f"the shape of a backbone is known of {', '.join(_GATED_MLP)} only"
        require(inner.model_type in _GATED_MLP, ConfigError, rule, inner.model_type, _STATE)
        size = "n_inner" if hasattr(inner, "n_inner") else "intermediate_size"
        width = int(getattr(inner, size, None) or 4 * inner.hidden_size)  # GPT-2's rule
        return cls._of(inner, width, _GATED_MLP[inner.model_type])

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> Self:
        """Read the shape of a model at hand.

        Of a family that is not known, the weights of its blocks are counted: those that attention
        does not take are a feed-forward part with a gate.
        """
        from torch import nn

        inner, trunk = model.config.get_text_config(), model.base_model
        if inner.model_type in _GATED_MLP:
            return cls.of_config(inner)
        tables = {id(part.weight) for part in trunk.modules() if isinstance(part, nn.Embedding)}
        counted = (p.numel() for p in trunk.parameters() if p.ndim == 2 and id(p) not in tables)
        least = cls._of(inner, 1, True)
        width = sum(counted) / (least.layers * least.hidden_size)
        attention = 2 * (least.query_width + least.kv_width)
        return cls._of(inner, max(1, round((width - attention) / 3)), True)

    @classmethod
    def _of(cls, config: PreTrainedConfig, intermediate_size: int, gated_mlp: bool) -> Self:
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        rule = "the sizes of a backbone's configuration must make a shape"
        with described(rule, _STATE, ConfigError):
            return cls(
                hidden_size=hidden,
                intermediate_size=intermediate_size,
                layers=int(config.num_hidden_layers),
                heads=heads,
                kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
                vocab_size=int(config.vocab_size),
                tied=bool(config.tie_word_embeddings),
                gated_mlp=gated_mlp,
            )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_weights(self) -> int:
        """Weights P of all blocks' matrices: l (d (2 h k + 2 g k) + (3 or 2) d f).

        Each takes part in one product per token.
        """
        attention = 2 * (self.query_width + self.kv_width)
        mlp = (3 if self.gated_mlp else 2) * self.intermediate_size
        return self.layers * self.hidden_size * (attention + mlp)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def weights(self) -> int:
        """All weights: the blocks, the embedding matrix and, unless tied, the head."""
        return self.block_weights + (1 if self.tied else 2) * self.head_weights


def local_shape(name: str, revision: str | None = None) -> BackboneShape | None:
    """Return the shape of a backbone, None where its configuration is not on this machine."""
    from umim_core.backbone.tokenizer_files import FOREIGN_ERRORS

    try:
        config = _configuration(name, revision, local_files_only=True)
    except (BackboneError, *FOREIGN_ERRORS):
        return None
    return BackboneShape.of_config(config)


def _configuration(name: str, revision: str | None, *, local_files_only: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    from umim_core.backbone.tokenizer_files import check_place

    config: PreTrainedConfig = AutoConfig.from_pretrained(
        check_place("backbone", name, "config.json", revision, local_files_only),
        revision=revision,
        trust_remote_code=False,
        local_files_only=local_files_only,
    )
    return config


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the most positions of a model, or None if its configuration names none.

    LongRoPE has a second set of frequencies for long rows, and the longest row of a forward chooses
    that of all its rows, whatever set their keys in the cache have. So positions end where the
    second set begins: up to there a row is what it is alone, and what transformers generates.
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    ropes = getattr(config, "rope_parameters", None)
    each = [ropes, *ropes.values()] if isinstance(ropes, dict) else []  # one, or one a layer type
    long = [x for x in each if isinstance(x, dict) and x.get("rope_type") == "longrope"]
    return min([most, *(int(rope["original_max_position_embeddings"]) for rope in long)])


def trained_context(name: str, revision: str | None = None) -> int | None:
    """Return the most tokens of an input by a backbone's configuration; None if not known."""
    try:
        config = _text_configuration(name, revision)
    except BackboneError:  # a name of a service
        return None
    return None if config is None else positions_of(config)


def check_row_length(length: int, most: int | None, name: str, remedy: str) -> None:
    """Refuse rows of more tokens than a model has positions; None: they are not bounded."""
    rule = f"rows must have at most {most} tokens, the positions of {name}"
    require(most is None or length <= most, ConfigError, rule, length, remedy)


def configured_number(field: str, name: str, revision: str | None = None) -> int | None:
    """Return a number of a backbone's configuration; None where it has none."""
    number = getattr(_text_configuration(name, revision), field, None)
    return number if isinstance(number, int) else None


def _text_configuration(name: str, revision: str | None) -> PreTrainedConfig | None:
    from umim_core.backbone.tokenizer_files import FOREIGN_ERRORS

    try:
        config = _configuration(name, revision, local_files_only=False).get_text_config()
    except FOREIGN_ERRORS:  # a directory of a tokenizer alone, say
        return None
    return config
