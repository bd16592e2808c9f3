"""Ways to pack a file, by the ending of its name."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

import pyarrow as pa

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
