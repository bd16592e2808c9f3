"""Identity of a model: its architecture, its configuration and its weights, in digests."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final

import torch
import transformers
from pydantic import Field, TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from umim_core.errors import BackboneError, require
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.store.user_cache import remembered

# Fields of a configuration that say how a model is stored or run, not what it computes.
_NOT_ARCHITECTURE: Final = {
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "output_attentions", "output_hidden_states", "pad_token_id", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Fields that count in a fingerprint and yet change nothing of a frozen model.
_FOR_TRAINING: Final = re.compile(
    r".*dropout.*|.*pdrop|.*layerdrop|initializer_.*|init_std|id2label|label2id|problem_type"
    r"|task_specific_params|summary_.*|router_aux_loss_coef|output_router_logits"
)
# Fields that transformers reads of any configuration, whether its class declares them or not.
_READ_OF_ALL: Final = {
    "attention_chunk_size", "head_dim", "is_causal", "kv_sharing_modes", "layer_types",
    "model_type", "quantization_config", "sliding_window",
}  # fmt: skip
_LINE = Annotated[str, Field(pattern=r" \([\d, ]*\) [0-9a-f]{64}$")]
_LINES: Final = TypeAdapter(Annotated[tuple[_LINE, ...], Field(min_length=1)])
_SMALLEST: Final = 256 << 20  # bytes of weights; fewer are hashed in an instant


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model.

    Attributes:
        model_type: Its family.
        config: What of its configuration counts: what differs from the base class's defaults.
        weights: A line per tensor with its name, shape and SHA-256.
        neutral: Fields of ``config`` that change nothing of a frozen model.
    """

    model_type: str
    config: Mapping[str, object]
    weights: tuple[str, ...]
    neutral: frozenset[str]

    @property
    def fingerprint(self) -> str:
        lines = [self.model_type, canonical_json(dict(self.config)), *self.weights]
        return sha256_bytes("\n".join(lines).encode())

    @property
    def function(self) -> dict[str, object]:
        return {name: value for name, value in self.config.items() if name not in self.neutral}

    @property
    def weights_digest(self) -> str:
        return sha256_bytes("\n".join(self.weights).encode())


def model_identity(model: PreTrainedModel, weights: tuple[str, ...] | None = None) -> ModelIdentity:
    """Return what a model of transformers computes: architecture, configuration and weights.

    Of the configuration, what differs from the base class's defaults counts (rotary base, norm
    epsilon, activation ...). Its lines of ``weight_lines`` are hashed if they are not given.
    """
    config = model.config.to_diff_dict()
    architecture = {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE}
    return ModelIdentity(
        model_type=str(model.config.model_type),
        config=architecture,
        weights=weight_lines(model) if weights is None else weights,
        neutral=_neutral(model, architecture),
    )


def weight_lines(model: PreTrainedModel) -> tuple[str, ...]:
    """Return a line per tensor with its name, shape and SHA-256.

    Weights are hashed as bfloat16, so that one model loaded as float32, bfloat16 or float64 keeps
    its fingerprint as long as it was published in bfloat16 or wider.
    """
    lines = []
    rule = "the weights of a backbone must be plain tensors"
    remedy = "Load it unquantised, or quantise it with transformers' quantization_config."
    for name, value in sorted(model.state_dict().items()):
        plain = isinstance(value, Tensor) and not value.is_quantized and not value.is_meta
        found = f"{type(model).__name__}: {name} is packed, or on no device"
        require(plain, BackboneError, rule, found, remedy)
        raw = value.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        lines.append(f"{name} {tuple(value.shape)} {sha256_bytes(raw.tobytes())}")
    return tuple(lines)


def _neutral(model: PreTrainedModel, architecture: Mapping[str, object]) -> frozenset[str]:
    """Return the settings that no frozen model reads: of training, or in no line of its code."""
    declared = {field.name for field in fields(type(model.config))}
    code = _code(model)

    def is_neutral(name: str) -> bool:
        if name in declared:
            return _FOR_TRAINING.fullmatch(name) is not None
        if name in _READ_OF_ALL or code is None:
            return False
        return re.search(rf"\b{re.escape(name)}\b", code) is None

    return frozenset(filter(is_neutral, architecture))


def _code(model: PreTrainedModel) -> str | None:
    """Return the source that the model's classes stand in, or None where one has no file."""
    names = [cls.__module__ for cls in type(model).__mro__]
    modules = names[: names.index(PreTrainedModel.__module__)]
    try:
        return "\n".join(inspect.getsource(sys.modules[name]) for name in dict.fromkeys(modules))
    except (OSError, TypeError):  # a class of a notebook, say
        return None


def cached_weight_lines(
    files: Sequence[Path], model: PreTrainedModel, published: Callable[[], PreTrainedModel]
) -> tuple[str, ...]:
    """Return ``weight_lines`` of a model as it was published.

    It was loaded from ``files``, in any data type; ``published`` gives it in one that holds its
    weights, if they must be hashed.
    """
    stats = [(str(path.absolute()), path.stat()) for path in files]
    if sum(stat.st_size for _, stat in stats) < _SMALLEST:
        return weight_lines(published())
    key = {
        "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "config": dict(model_identity(model, ()).config),
        "transformers": transformers.__version__,
    }
    return remembered("weights", key, _LINES, lambda: weight_lines(published()))
