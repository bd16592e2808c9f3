"""A device that is not the CPU, simulated on the CPU: what a GPU refuses, it refuses.

Tensors of ``second:0`` wrap CPU tensors. Inside ``second_device()`` every operation is checked by
the rules of CUDA before it runs on what is wrapped:

- tensors of two devices do not mix; one CPU number (0-dim) beside device tensors does, where CUDA
  takes it as a kernel's argument, but never as the output;
- CPU indices into a device tensor are copied, device indices into a CPU tensor are refused;
- CPU values are not written by index or mask into a device tensor, unless they are one number;
- a CPU generator does not draw into a device tensor; ``numpy()`` needs ``cpu()`` first;
- ``mm`` of halves may give float32 (``out_dtype``), which no CPU kernel does.

Not simulated: speed, streams, autocast (nothing is cast), the
last bits of results, ties between weights (a tied weight is moved twice).

The first use registers the device for the rest of the process and must come before the first
backward pass: autograd starts its threads once, one per device it knows. Hence whoever uses it runs
in a process of its own, as ``test_second_device.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "second"
DEVICE = f"{NAME}:0"

aten = torch.ops.aten
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
MIXING = {"aten::copy_", "aten::_to_copy"} | INDEXED
# They take no CPU number beside device tensors; those that TensorIterator runs do.
STRICT = {
    f"aten::{name}"
    for name in (
        "cat", "stack", "gather", "scatter", "scatter_", "scatter_add", "index_select",
        "index_add", "index_add_", "index_copy", "embedding", "mm", "bmm", "addmm", "baddbmm",
        "masked_scatter", "masked_scatter_", "masked_select", "searchsorted", "cumsum",
        "native_layer_norm", "_softmax", "_log_softmax", "native_dropout",
    )
}  # fmt: skip
# Torch's own kinds of products whose result is wider than its factors.
WIDENING: Mapping[Any, Callable[..., Tensor]] = {
    aten.mm.dtype: torch.mm,
    aten.addmm.dtype: torch.addmm,
}

FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class SecondTensor(torch.Tensor):
    """A tensor of the device; ``held`` is its data on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> SecondTensor:
        made: SecondTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=torch.device(DEVICE), requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: object) -> str:
        return f"SecondTensor({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def moved(module: nn.Module) -> None:
    """Move a module in place, a transformers model or any other."""
    nn.Module.to(module, DEVICE)


def _on_device(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME  # type: ignore[call-overload]


def _refuse(name: str, why: str, tensors: Sequence[Tensor] = ()) -> None:
    sizes = ", ".join(f"cpu{list(tensor.shape)}" for tensor in tensors)
    raise RuntimeError(f"{name}: Expected all tensors to be on the same device: {why} {sizes}")


def _check(name: str, mutable: bool, args: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Refuse what CUDA refuses; at least one tensor is on the device."""
    host = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, SecondTensor)]
    if name in INDEXED:
        if not isinstance(args[0], SecondTensor):
            _refuse(name, "indices on the device into", [args[0]])
        values = args[2:3] if "put" in name else ()
        wrong = [v for v in values if not isinstance(v, SecondTensor) and v.dim()]
    elif name in MIXING:
        return
    else:
        numbers = 0 if name in STRICT else 2 if name == "aten::where" else 1
        scalars = [tensor for tensor in host if not tensor.dim()]
        wrong = [tensor for tensor in host if tensor.dim()] + scalars[numbers:]
        if mutable and not isinstance(args[0], SecondTensor):
            wrong.append(args[0])
    if wrong:
        _refuse(name, f"{DEVICE} and", wrong)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what stands in nested sequences."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _unwrap(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_unwrap, value))
    return value.held if isinstance(value, SecondTensor) else value


def _wrap(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_wrap, value))
    plain = isinstance(value, Tensor) and not isinstance(value, SecondTensor)
    return SecondTensor(value) if plain else value


@cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Return an operation's name, whether it writes to an argument, and whether results alias."""
    schema = func._schema
    return schema.name, schema.is_mutable, any(a.alias_info for a in schema.arguments)


def _widened(func: Any, args: Sequence[Any]) -> Tensor:
    """Multiply halves to float32, as cuBLAS does."""
    *factors, wide = args
    if wide is not torch.float32 or any(f.dtype.itemsize != 2 for f in factors[-2:]):
        raise RuntimeError(f"{func}: out_dtype must be float32 and the factors halves")
    return WIDENING[func](*(factor.to(wide) for factor in factors))


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Check an operation and run it on the CPU."""
    name, mutable, aliases = _facts(func)
    leaves = list(_leaves((args, tuple(kwargs.values()))))
    ours = target = any(isinstance(value, SecondTensor) for value in leaves)
    if kwargs.get("device") is not None:
        target = _on_device(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif name == "aten::copy_":
        target = isinstance(args[0], SecondTensor)
    if not ours and not target:
        return func(*args, **kwargs)
    if any(isinstance(value, torch.Generator) for value in leaves):
        _refuse(name, "a generator of the CPU")
    if ours:
        _check(name, mutable, args, leaves)
    if func in WIDENING:
        out: Any = _widened(func, _unwrap(args))
    else:
        out = func(*_unwrap(args), **{key: _unwrap(value) for key, value in kwargs.items()})
    if not target:
        return out
    wrapped = _wrap(out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if aliases else wrapped


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, _: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _FromValues(TorchFunctionMode):
    """Make tensors of Python values, which no dispatcher sees, on the CPU and copy them."""

    def __torch_function__(
        self, func: Any, _: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], SecondTensor):
            func, given = torch.tensor, {"dtype": args[0].dtype, "device": DEVICE, **given}
            args = args[1:]
        if func in INDEXING and isinstance(args[0], SecondTensor):
            listed = torch.tensor(args[1]) if isinstance(args[1], list) else args[1]
            return func(args[0], listed, *args[2:])
        if func in FROM_VALUES and _on_device(given.get("device")):
            device = given.pop("device")
            return func(*args, **given).to(device)
        return func(*args, **given)


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, *_: object) -> None:
        pass


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())


@contextmanager
def second_device() -> Iterator[None]:
    """Let ``second:0`` work inside the block."""
    _register()
    with _FromValues(), _Operations():
        yield
