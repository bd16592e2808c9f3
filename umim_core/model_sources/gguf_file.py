"""GGUF files: header, metadata and dequantised tensors, every length checked before it is used.

Layout of versions 2 and 3, little-endian::

    "GGUF" version:u32 tensors:u64 entries:u64
    entry   key:string kind:u32 value             a string is length:u64 and UTF-8
    tensor  name:string n:u32 sizes:u64[n] type:u32 offset:u64     fastest-moving size first
    padding to general.alignment, then the tensors' data
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import BackboneError, require

MAGIC: Final = b"GGUF"
DAMAGED: Final = "The file is damaged."
DIRECTORY_INSTEAD: Final = "Name the model's Hugging Face directory instead."
_STRING, _ARRAY = 8, 9
_SCALARS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_SMALLEST_ENTRY: Final = 13  # bytes: an empty key, its kind and one byte
_SMALLEST_TENSOR: Final = 24  # bytes of its description
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_TOO_LARGE: Final = 1 << 31
_MOST_ENTRIES: Final = 1 << 16
_MOST_VALUES: Final = 1 << 22  # of a header, members of lists counted: two seconds

Value = bool | int | float | str | list[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: Sizes in the order of numpy, the fastest-moving one last.
        kind: Type that the file stores it in: ``Q4_1``, ``F32`` ...
        data: Its bytes, mapped from the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]

    def values(self) -> NDArray[np.float32]:
        """Return the dequantised values in the tensor's shape."""
        from gguf import GGMLQuantizationType, dequantize

        rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # looked for below
                flat = dequantize(rows, GGMLQuantizationType[self.kind])
        except NotImplementedError as error:  # gguf publishes no list of those it knows
            rule = "the tensors of a GGUF file must have a type that can be dequantised"
            remedy = "Take another file of the model, for example one of type Q8_0 or F16."
            raise BackboneError(rule, f"{self.name} has {self.kind}", remedy) from error
        values: NDArray[np.float32] = np.ascontiguousarray(flat, np.float32).reshape(self.shape)
        rule = "the weights of a GGUF file must be finite"
        found = "has NaN or infinite values"
        finite = bool(np.isfinite(values).all())
        require(finite, BackboneError, rule, f"{self.name} {found}", "Fetch the file again.")
        return values


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    def text(self, key: str, default: str | None = None) -> str:
        return self._entry(key, str, "a string", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an entry that is a whole number, else ``default``, which is None if it must be."""
        return self._entry(key, int, "one whole number", default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._entry(key, bool, "true or false", default)

    def size(self, key: str, default: int | None = None) -> int:
        """Return an entry that is a whole number above zero; see ``integer``."""
        value = self.integer(key, default)
        return value if 0 < value < _TOO_LARGE else self._wrong(key, value, "a size")

    def positive(self, key: str, default: float | None = None) -> float:
        """Return an entry that is a finite number above zero; see ``integer``."""
        is_int = type(self.metadata.get(key)) is int
        value = self.integer(key) if is_int else self._entry(key, float, "a number", default)
        return value if 0 < value < math.inf else self._wrong(key, value, "finite and above zero")

    def texts(self, key: str) -> list[str]:
        return self._entries(key, str, "a list of strings")

    def integers(self, key: str) -> list[int]:
        return self._entries(key, int, "a list of whole numbers")

    def _entries(self, key: str, kind: type[T], name: str) -> list[T]:
        value = self._entry(key, list, name, None)
        strange = next((entry for entry in value if not isinstance(entry, kind)), None)
        return value if strange is None else self._wrong(key, strange, name)

    def _entry(self, key: str, kind: type[T], name: str, default: T | None) -> T:
        value = self.metadata.get(key, default)
        rule = "a GGUF file of a language model must say what the model is"
        remedy = "Take a file of a whole model, not of an adapter or of a vocabulary alone."
        require(value is not None, BackboneError, rule, f"{self.path} lacks {key}", remedy)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._wrong(key, value, name)
        return value

    def _wrong(self, key: str, value: object, kind: str) -> NoReturn:
        remedy = "The file is damaged, or made by a tool that stores it otherwise."
        raise BackboneError(f"{key} of a GGUF file must be {kind}", value, remedy)


def unreadable(path: Path, error: OSError) -> BackboneError:
    rule = "a model's file must be readable"
    return BackboneError(rule, f"{path}: {error.strerror}", "Check the path.")


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file; its tensors stay on disk until their values are asked for."""
    try:
        if path.stat().st_size < len(MAGIC):
            _torn(path, "it has fewer than 4 bytes")
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error
    begin = data[: len(MAGIC)].tobytes()
    remedy = "Name a .gguf file, or a Hugging Face directory."
    rule = "a GGUF file must start with the letters GGUF"
    require(begin == MAGIC, BackboneError, rule, f"{path} starts with {begin!r}", remedy)
    return _Reader(path, data).read()


def _torn(path: Path, reason: str) -> NoReturn:
    remedy = "It is cut off or damaged; fetch it again."
    raise BackboneError("a GGUF file must be whole", f"{path}: {reason}", remedy)


class _Reader:
    """A place in a mapped file that moves forward."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self.data, self.at = path, data, len(MAGIC)
        self.header, self.values = data.data, 0  # slices of numpy take five times as long

    def read(self) -> GgufFile:
        version = self.scalar("I")
        rule = "a GGUF file must be little-endian, of version 2 or 3"
        remedy = "Convert the model again with a current llama.cpp."
        found = f"{self.path} says version {version}"
        require(version in (2, 3), BackboneError, rule, found, remedy)
        tensors, entries = self.count(_SMALLEST_TENSOR), self.count(_SMALLEST_ENTRY)
        if max(tensors, entries) > _MOST_ENTRIES:
            _torn(self.path, f"its header has {tensors:,} tensors and {entries:,} entries")
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            key = self.string()
            metadata[key] = self.value(int(self.scalar("I")))
        table = [self.description() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            _torn(self.path, f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        by_name = {entry[0]: self.tensor(*entry, start) for entry in table}
        if len(by_name) < len(table):
            _torn(self.path, "two tensors have one name")
        return GgufFile(self.path, metadata, by_name)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            _torn(self.path, f"it ends after {len(self.data):,} bytes, within its header")
        part = bytes(self.header[self.at : end])
        self.at = end
        return part

    def scalar(self, form: str) -> bool | int | float:
        value: bool | int | float = struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]
        return float(str(np.float32(value))) if form == "f" else value  # 1e-05, not 9.99..e-06

    def count(self, size: int) -> int:
        """Read how many entries of at least ``size`` bytes follow."""
        count = int(self.scalar("Q"))
        if count * size > len(self.data) - self.at:
            _torn(self.path, f"it ends after {len(self.data):,} bytes, before {count:,} entries")
        self.values += count
        if self.values > _MOST_VALUES:
            _torn(self.path, f"its header has over {_MOST_VALUES:,} values")
        return count

    def string(self) -> str:
        part = self.take(int(self.scalar("Q")))
        try:
            return part.decode()
        except UnicodeDecodeError:
            _torn(self.path, f"{part[:40]!r} is not UTF-8")

    def value(self, kind: int) -> Value:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        _torn(self.path, f"an entry is of the unknown kind {kind}")

    def array(self) -> list[Any]:
        kind = int(self.scalar("I"))
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8))]
        if kind not in _SCALARS:
            _torn(self.path, f"a list has entries of kind {kind}")
        form = _SCALARS[kind]
        count = self.count(struct.calcsize(form))
        return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(form))))

    def description(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, sizes in the order of numpy, type and offset from the first."""
        name = self.string()
        dimensions = int(self.scalar("I"))
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            _torn(self.path, f"{name} has {dimensions} dimensions")
        shape = tuple(reversed([int(self.scalar("Q")) for _ in range(dimensions)]))
        return name, shape, int(self.scalar("I")), int(self.scalar("Q"))

    def tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
    ) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in GGML_QUANT_SIZES:
            _torn(self.path, f"{name} is of the unknown type {kind}")
        form = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[form]
        if 0 in shape or shape[-1] % block:
            _torn(self.path, f"{name} has the sizes {shape} in blocks of {block}")
        first = start + offset
        end = first + math.prod(shape) // block * size
        if end > len(self.data):
            _torn(self.path, f"it has {len(self.data):,} bytes, and {name} would end at {end:,}")
        return GgufTensor(name, shape, form.name, self.data[first:end])
