"""GGUF files as backbones: converted once per content, named wherever a backbone is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from support.gguf_files import tiny_bpe, tiny_llama, write_gguf
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import backbone_identity
from umim_core.backbone.tokenizer_files import load_tokenizer, quantisation_note
from umim_core.errors import BackboneError
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.model_cache import gguf_directory
from umim_core.store.artifacts import directory_digest

PIPELINE = tiny_bpe()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "records"))
    return tmp_path / "models"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    return make(tmp_path / "own.gguf")


def make(path: Path, seed: int = 0) -> Path:
    return write_gguf(path, tiny_llama(PIPELINE, seed), PIPELINE, kind="Q8_0")


def conversions(caplog: pytest.LogCaptureFixture) -> int:
    return sum("converting" in record.getMessage() for record in caplog.records)


def test_a_backbone_may_be_a_gguf_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = load_backbone("own.gguf")
    assert backbone.name == "own.gguf"
    assert backbone.decode(backbone.encode("the cat 24")) == "the cat 24"
    other = load_backbone(str(gguf_directory(file)))
    assert backbone.fingerprint == other.fingerprint
    assert torch.equal(backbone.embedding_weight, other.embedding_weight)
    assert backbone_identity("own.gguf", None) == backbone_identity(other.name, None)
    assert "own.gguf was quantised (Q8_0 " in quantisation_note("own.gguf")
    assert quantisation_note("umim-docs-llama") == ""


def test_a_file_of_the_models_folder_is_found_by_its_name(file: Path, cache: Path) -> None:
    with pytest.raises(BackboneError, match=rf"Put it into {cache}, or name its path"):
        load_tokenizer("own.gguf")
    cache.mkdir(exist_ok=True)
    file.rename(cache / "own.gguf")
    assert backbone_identity("own.gguf", None) == backbone_identity(str(cache / "own.gguf"), None)
    with pytest.raises(BackboneError):  # another folder was meant
        load_tokenizer("elsewhere/own.gguf")


def test_a_file_is_converted_once_under_any_name(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tokenizer(str(file))
    load_backbone(str(file))
    shutil.copy(file, tmp_path / "copy.gguf")
    assert gguf_directory(tmp_path / "copy.gguf") == gguf_directory(file)
    assert conversions(caplog) == 1


def test_a_file_that_changes_while_it_is_converted_is_refused(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(path: Path, out: Path) -> None:
        convert_gguf(path, out)
        before = path.stat()
        make(path, seed=1)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr("umim_core.model_sources.model_cache.convert_gguf", convert)
    with pytest.raises(BackboneError, match="must stay as it is while it is converted"):
        gguf_directory(file)
    assert [*cache.glob("gguf-*/")] == []


def test_a_damaged_conversion_is_made_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = gguf_directory(file)
    before = directory_digest(directory)
    (directory / "model.safetensors").write_bytes(b"torn")
    assert directory_digest(gguf_directory(file)) == before
    assert conversions(caplog) == 2
    assert " is built again: " in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.gguf", "a file that does not exist. Put it into "),
        ("folder", "a folder of 2 GGUF files. Name the file: folder/a.gguf, folder/b.gguf"),
        ("text.txt", "a file. Name a .gguf file or a model's directory"),
        ("no.gguf", "must start with the letters GGUF"),
    ],
)
def test_what_is_no_model_is_named(
    name: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for part in ("folder/a.gguf", "folder/b.gguf", "text.txt", "no.gguf"):
        (tmp_path / part).write_text("no model")
    for load in (load_tokenizer, load_backbone):
        with pytest.raises(BackboneError) as error:
            load(name)
        assert said in str(error.value)
    assert not cache.exists() or not [*cache.glob("gguf-*")]
