from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from support.processes import output_of
from umim_core.embedded.assets import embedded_path
from umim_core.store.artifacts import sha256_file

NAMES = ("umim-docs-gpt2", "umim-docs-llama")
MAX_BYTES = 16 * 1024 * 1024
MAX_ASSETS = 100 * 1024 * 1024  # all of them; a wheel packs them to 77 MB, PyPI takes 100


def backbone_directory(name: str) -> Path:
    path = embedded_path(name, "backbone")
    assert path is not None
    return path


@pytest.mark.parametrize(
    "name", ["", "umim-docs", "umim-docs-llama/..", "../assets/umim-docs-llama"]
)
def test_other_names_have_no_path(name: str) -> None:
    assert embedded_path(name, "backbone") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_backbone_is_small_and_in_bfloat16_and_all_assets_fit_in_a_wheel(name: str) -> None:
    directory = backbone_directory(name)
    assert sum(path.stat().st_size for path in directory.iterdir()) <= MAX_BYTES
    assert not [path for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".py")]
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        assert {stored.get_slice(key).get_dtype() for key in stored.keys()} == {"BF16"}  # noqa: SIM118
    assets = directory.parents[1]
    assert sum(path.stat().st_size for path in assets.rglob("*") if path.is_file()) <= MAX_ASSETS


@pytest.mark.full
def test_backbones_load_without_a_network() -> None:
    """In a process of its own, where every connection is an error."""
    probe = """
import socket
def refuse(*_, **__):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import json
from umim_core.store.artifacts import sha256_file
from umim_core.backbone.backbone import load_backbone
found = {}
for name in ("umim-docs-gpt2", "umim-docs-llama"):
    backbone = load_backbone(name)
    found[name] = [backbone.tokenizer_fingerprint, backbone.vocab_size, backbone.max_positions]
print(json.dumps(found))
"""
    found = json.loads(output_of(sys.executable, "-c", probe))
    assert [found[name][1:] for name in NAMES] == [[8192, 1024], [8192, 2048]]
    assert found[NAMES[0]][0] == found[NAMES[1]][0]


def test_shipped_files_are_those_that_were_released() -> None:
    """``sha256sum -c`` reads the list too."""
    assets = backbone_directory(NAMES[0]).parents[1]
    listed = Path(__file__).with_name("assets.sha256").read_text(encoding="utf-8").split("\n")
    found = [
        f"{sha256_file(path)}  {path.relative_to(assets).as_posix()}"
        for path in sorted(assets.rglob("*"), key=lambda path: path.relative_to(assets).as_posix())
        if path.is_file()
    ]
    assert found == sorted(filter(None, listed), key=lambda line: line.split("  ")[1])
