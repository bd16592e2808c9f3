"""One's own checkpoints have names and next steps; what is no checkpoint is told what it is."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.command_line import Umim, console
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.checkpoint.checkpoint_index import (
    artifact_root,
    own_checkpoint,
    own_checkpoints,
    own_name,
    record_checkpoint,
)
from umim_core.checkpoint.next_steps import after_pruning
from umim_core.errors import CheckpointError, ConfigError


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def stage(root: Path, tiny_checkpoint: Path) -> Path:
    """A finished stage that holds a checkpoint."""
    directory = root / "distill" / f"0123abcd{'e' * 56}"
    shutil.copytree(tiny_checkpoint, directory / "checkpoint")
    return directory


def test_an_address_has_a_local_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UMIM_SCRATCH", raising=False)
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    one = artifact_root()
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/other")
    assert one.is_absolute() and one.parent == artifact_root().parent and one != artifact_root()
    monkeypatch.setenv("UMIM_SCRATCH", str(tmp_path))
    assert artifact_root() == tmp_path.resolve()
    monkeypatch.setenv("UMIM_ROOT", "file:///tmp/umim")
    with pytest.raises(ConfigError, match="Give the path of the directory"):
        artifact_root()


def test_a_command_that_stores_nothing_refuses_an_address(
    monkeypatch: pytest.MonkeyPatch, umim: Umim
) -> None:
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    done = umim("prune", "umim-docs-llama", "text.txt", "--keep-all")
    assert done.code == 1 and "Name a directory with --out" in done.err
    assert "secret" not in done.err


def test_a_name_is_fit_for_the_command_line() -> None:
    name = own_name("novels", "llama tau 5 greedy+drop, learned positions", "WT + FT")
    assert name == "novels/llama-tau-5-greedy-drop-learned-positions/wt-ft"


def test_a_recorded_checkpoint_is_found_by_its_name(root: Path, stage: Path, umim: Umim) -> None:
    record_checkpoint(root, "novels/llama-tau-5/wt", stage / "checkpoint")
    assert resolve_checkpoint("novels/llama-tau-5/wt") == stage / "checkpoint"
    assert umim("path", "novels/llama-tau-5/wt").out.strip() == str(stage / "checkpoint")
    listed = umim("path").out.splitlines()
    assert listed[-1].split() == ["novels/llama-tau-5/wt", str(stage / "checkpoint")]


def test_runs_that_give_one_name_at_once_all_record_it(root: Path, stage: Path) -> None:
    def record(_: int) -> Path:
        return record_checkpoint(root, "novels/wt", stage / "checkpoint")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(record, range(64)))) == 1
    assert own_checkpoints(root) == {"novels/wt": stage / "checkpoint"}


def test_names_survive_a_move_of_the_root(
    root: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_checkpoint(root, "a/b/wt", stage / "checkpoint")
    moved = root.rename(root.with_name("moved"))
    assert own_checkpoints(moved) == {"a/b/wt": moved / stage.relative_to(root) / "checkpoint"}


def test_the_digits_that_a_log_shows_find_the_checkpoint(stage: Path) -> None:
    assert resolve_checkpoint(stage.name[:12]) == stage / "checkpoint"
    shutil.copytree(stage, stage.with_name(stage.name[:63] + "f"))
    assert own_checkpoint(stage.name[:12]) is None  # two begin so


@pytest.mark.parametrize("name", ["../distill", "a/../../distill", ".."])
def test_a_name_cannot_climb_out_of_the_index(stage: Path, name: str) -> None:
    assert own_checkpoint(name) is None


def test_a_misspelt_name_is_told_the_right_one() -> None:
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'umim-docs-llama'\?"):
        resolve_checkpoint("umim-docs-lama")


@pytest.mark.parametrize("revision", [None, "v2"])
def test_training_is_printed_for_models_that_the_command_takes(
    tiny_checkpoint: Path, revision: str | None
) -> None:
    config = read_config(tiny_checkpoint).model_copy(update={"backbone_revision": revision})
    generate, train = after_pruning(Path("less"), config, ["a.txt"], {})
    assert generate.startswith("  umim generate")
    if revision is None:
        assert train.startswith("  umim train") and "--start less --out less-trained" in train
    else:
        assert "revision v2" in train and "recipe" in train
