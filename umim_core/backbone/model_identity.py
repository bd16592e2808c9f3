"""Identity of a model: its architecture, its configuration and its weights, in digests."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Final

import torch
import transformers
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from umim_core.errors import BackboneError
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.store.user_records import remembered

# Fields of a configuration that say how a model is stored or run, not what it computes.
_NOT_ARCHITECTURE: Final = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Fields that count in a fingerprint and yet change nothing of a frozen model.
_FOR_TRAINING: Final = re.compile(
    r".*dropout.*|.*pdrop|.*layerdrop|initializer_.*|init_std|id2label|label2id|problem_type"
    r"|task_specific_params|summary_.*|router_aux_loss_coef|output_router_logits"
)
# Fields that transformers reads of any configuration, whether its class declares them or not.
_READ_OF_ALL: Final = frozenset(
    {
        "attention_chunk_size",
        "head_dim",
        "is_causal",
        "kv_sharing_modes",
        "layer_types",
        "quantization_config",
        "sliding_window",
    }
)
_DEFAULT: Final = "the default"


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model.

    Attributes:
        model_type: Its family.
        config: What of its configuration counts: what differs from the base class's defaults.
        weights: A line per tensor with its name, shape and SHA-256.
        neutral: Fields of ``config`` that change nothing of a frozen model, with the values that
            they have where nobody set them; fields that nothing reads have None.
    """

    model_type: str
    config: Mapping[str, object]
    weights: tuple[str, ...]
    neutral: Mapping[str, object]

    @property
    def fingerprint(self) -> str:
        return self._digest(self.config)

    @property
    def fingerprints(self) -> frozenset[str]:
        """That of the model as it is, and as it would be with neutral settings at their defaults.

        A checkpoint that records a fingerprint only may have been made with some of them set.
        """
        unread = {name for name, value in self.neutral.items() if value is None}
        dropout = {name for name in self.neutral if "drop" in name}
        groups: list[set[str]] = [set(), unread, dropout, unread | dropout, set(self.neutral)]
        return frozenset(self._digest(self._plain(names)) for names in groups)

    @property
    def function(self) -> dict[str, object]:
        return {name: value for name, value in self.config.items() if name not in self.neutral}

    def _plain(self, names: set[str]) -> dict[str, object]:
        plain = {name: value for name, value in self.config.items() if name not in names}
        defaults = {name: self.neutral[name] for name in names}
        return plain | {name: value for name, value in defaults.items() if value is not None}

    @property
    def weights_digest(self) -> str:
        return sha256_bytes("\n".join(self.weights).encode())

    def _digest(self, config: Mapping[str, object]) -> str:
        lines = [self.model_type, canonical_json(dict(config)), *self.weights]
        return sha256_bytes("\n".join(lines).encode())

    def differences(
        self, model_type: str, config: Mapping[str, object], weights_digest: str
    ) -> list[str]:
        """Say where this model differs from a recorded one; neutral settings do not count.

        ``config`` is the ``function`` of the recorded one.

        Returns:
            "field recorded -> ours" per difference; empty if both compute the same.
        """
        if model_type != self.model_type:
            return [f"model_type {model_type!r} -> {self.model_type!r}"]
        changes, ours = [], self.function
        for name in sorted(config.keys() | ours.keys()):
            then, now = (canonical_json(c.get(name, _DEFAULT)) for c in (config, ours))
            if then != now:
                changes.append(f"{name} {then} -> {now}")
        if weights_digest != self.weights_digest:
            changes.append("the weights")
        return changes


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
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor) or value.is_quantized or value.is_meta:
            raise BackboneError(
                "the weights of a backbone must be plain tensors",
                f"{type(model).__name__}: {name} is packed, or on no device",
                "Load it unquantised, or quantise it with transformers' quantization_config.",
            )
        raw = value.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        lines.append(f"{name} {tuple(value.shape)} {sha256_bytes(raw.tobytes())}")
    return tuple(lines)


def _neutral(model: PreTrainedModel, architecture: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that change nothing, with their defaults, or None if nothing has them."""
    defaults = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(type(model.config))
    }
    base = {field.name for field in fields(PreTrainedConfig)}
    code = _code(model)
    neutral: dict[str, object] = {}
    for name in architecture.keys() - {"model_type"}:
        if name in defaults and _FOR_TRAINING.fullmatch(name):
            # What the base class has and is at its default is not recorded.
            neutral[name] = None if name in base else defaults[name]
        elif name in defaults or name in _READ_OF_ALL or code is None:
            continue
        elif re.search(rf"\b{re.escape(name)}\b", code) is None:
            neutral[name] = None
    return neutral


def _code(model: PreTrainedModel) -> str | None:
    """Return the source that the model's classes stand in, or None where one has no file."""
    names = [cls.__module__ for cls in type(model).__mro__]
    modules = names[: names.index(PreTrainedModel.__module__)]
    try:
        return "\n".join(inspect.getsource(sys.modules[name]) for name in dict.fromkeys(modules))
    except (OSError, TypeError):  # a class of a notebook, say
        return None


_SMALLEST: Final = 256 << 20  # bytes of weights; fewer are hashed in an instant


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
    shapes = [f"{name} {tuple(value.shape)} " for name, value in sorted(model.state_dict().items())]

    def fits(lines: tuple[str, ...]) -> bool:
        return len(lines) == len(shapes) and all(
            re.fullmatch(re.escape(shape) + "[0-9a-f]{64}", line)
            for line, shape in zip(lines, shapes, strict=True)
        )

    lines = TypeAdapter(tuple[str, ...])
    return remembered("weights", key, lines, lambda: weight_lines(published()), fits)
