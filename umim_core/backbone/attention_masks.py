"""Attention windows of a backbone, and the mask of rows of different lengths.

Masks are additive and floating: a bool mask is silently wrong in transformers' eager attention.

Shapes: B rows, W units per row and forward, L columns of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import Lock, RLock
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from umim_core.backbone.row_cache import RowCache
from umim_core.errors import GenerationError

T = TypeVar("T")


def attention_window(config: PreTrainedConfig) -> int | None:
    """Return the shortest attention window of a backbone in tokens; None without windows."""
    windows: list[int] = []
    layer_types, layer_options = get_layer_types_and_kwargs(config)
    for layer_type, options in zip(layer_types, layer_options, strict=True):
        if "sliding_window" in options and "number_of_states" not in options:
            windows.append(int(options["sliding_window"]))
        elif layer_type != "full_attention":
            rule = "every layer of a backbone must be full or sliding-window attention"
            remedy = "Recurrent states cannot be rolled back; use an attention-only backbone."
            raise GenerationError(rule, layer_type, remedy)
    settings = config.to_dict()
    if "local" in (settings.get("attention_layers") or ()):  # GPT-Neo names its windows otherwise
        windows.append(int(settings["window_size"]))
    return min(windows, default=None)


def step_mask(cache: RowCache, dtype: torch.dtype) -> Tensor | None:
    """Build the additive mask of the forward under way, between ``begin`` and the forward.

    It is [B, 1, W, view]: 0 where a unit may look (columns up to its own), the lowest finite value
    behind it. None where all rows have the same length: padding on the right is then behind every
    unit's sight, and the model's own mask is right and fast.
    """
    if cache.plan.uniform_start is not None:
        return None
    columns = torch.arange(cache.plan.view, device=cache.device)
    return additive_mask(columns[None, None, :] <= cache.plan.columns[:, :, None], dtype)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn whether query i may see key j [B, W, L] (bool) into a mask for a floating type.

    The mask [B, 1, W, L] is 0 where allowed, the lowest finite value elsewhere.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


# One switch of a model at a time: two threads would end each other's, and compute wrong numbers.
_SWITCHES: Final[WeakKeyDictionary[PreTrainedModel, RLock]] = WeakKeyDictionary()
_SWITCHES_LOCK: Final = Lock()


@contextmanager
def attention_switched(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Have a model compute attention in another way meanwhile; other threads wait for their turn.

    Only threads that switch it wait. One that merely runs the model computes with what is set, so
    whoever switches to an implementation of its own must serve those, too.
    """
    with _SWITCHES_LOCK:
        lock = _SWITCHES.setdefault(model, RLock())
    with lock:
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


class OwnAttention(Generic[T]):
    """An attention of ours in the table where transformers looks attention functions up.

    ``attend`` gets a value that is given to this thread, the module, query [B, A, T, D], key and
    value [B, H, T, D] and transformers' options, no mask; it returns [B, T, A, D]. Other threads
    that run the model meanwhile have no value and get sdpa attention.
    """

    def __init__(self, name: str, attend: Callable[..., Tensor]) -> None:
        self._name, self._attend = name, attend
        self._value: ContextVar[T | None] = ContextVar(name, default=None)
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, self._mask)

    @contextmanager
    def given(self, model: PreTrainedModel, value: T) -> Iterator[T]:
        with attention_switched(model, self._name):
            token = self._value.set(value)
            try:
                yield value
            finally:
                self._value.reset(token)

    def _attention(self, *states: Any, **options: Any) -> tuple[Tensor, None]:
        given = self._value.get()
        if given is None:
            return sdpa_attention_forward(*states, **options)
        *states_without_mask, _ = states
        return self._attend(given, *states_without_mask, **options), None

    def _mask(self, *args: Any, **options: Any) -> Tensor | None:
        return sdpa_mask(*args, **options) if self._value.get() is None else None


def eager_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Have a model compute attention eagerly meanwhile: its other kinds keep no weights."""
    return attention_switched(model, "eager")
