"""Disks that refuse: full ones, and the k-th write, flush or rename that fails.

All stages: ``flows/test_refusing_disks.py``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from support.faulty_disk import PAGE, Faults, leftovers, published
from support.tiny_mining import NoCluster, TinyCorpus
from support.tiny_pipeline import counting_in_process
from umim_core.errors import ArtifactError
from umim_core.rules.ruleset import RuleSet

Run = Callable[[Path], str]


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer, 1000)


@pytest.fixture(scope="module")
def runs(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Each writer by name: it writes below a root and returns the digest of what is there."""
    made = tmp_path_factory.mktemp("made")
    with counting_in_process():
        counted = corpus.count(made, NoCluster())
        rules = RuleSet.load(corpus.filter(made, counted).path / "rules")

        def save(root: Path) -> str:
            if not (root / "rules").exists():
                rules.save(root / "rules")
            return RuleSet.load(root / "rules").digest

        yield {
            "count": lambda root: corpus.count(root, NoCluster()).digest,
            "filter": lambda root: corpus.filter(root, counted).digest,
            "rules": save,
        }


@pytest.mark.parametrize("name", ["count", "filter", "rules"])
def test_a_full_disk_is_named_with_path_and_bytes_and_the_rerun_succeeds(
    runs: dict[str, Run], small_disk: Callable[[int], Path], tmp_path: Path, name: str
) -> None:
    want = runs[name](tmp_path / "undisturbed")
    refused: set[str] = set()
    for pages in range(1, 200):
        root = small_disk(pages * PAGE)
        try:
            assert runs[name](root) == want
            break
        except ArtifactError as error:
            found = re.match(
                r"(/\S+) \(\d+ bytes.*\) must be writable; got No space left", str(error)
            )
            assert found, str(error)
            refused.add(Path(found[1]).name)
        assert published(root) == []
        assert runs[name](small_disk(1 << 24)) == want, "the rerun succeeds"
        assert leftovers(root) == []
        for path in root.iterdir():
            shutil.rmtree(path)
    else:
        pytest.fail("the disk was never large enough")
    assert len(refused) >= 3, refused


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("count", 1, marks=pytest.mark.full),
        ("count", 7),
        ("filter", 1),
        ("rules", 1),
    ],
)
def test_whichever_write_flush_or_rename_fails_the_artifact_is_whole_or_absent(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    want = runs[name](tmp_path / "undisturbed")
    faults = Faults(monkeypatch)
    refused: set[str | None] = set()
    ignored: set[str | None] = set()
    for fail_at in range(1, 500, step):
        root = tmp_path / str(fail_at)
        faults.arm(fail_at)
        try:
            assert runs[name](root) == want
            ignored.add(faults.fired)
        except ArtifactError as error:
            assert "must be writable; got Input/output error" in str(error)
            refused.add(faults.fired)
        fired = faults.fired
        faults.arm(0)
        for path in published(root):
            assert (path / "manifest.json").is_file(), "whole: only the last flush failed"
        assert runs[name](root) == want, f"rerun after call {fail_at} ({fired}) failed"
        assert leftovers(root) == []
        if fired is None:
            break
    else:
        pytest.fail("every run failed")
    assert refused == {"write", "fsync", "replace", "rename"} if step == 1 else refused
    assert ignored <= {None, "pwrite"}, "only the note in a lock may fail without consequences"
