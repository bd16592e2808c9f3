"""Counting killed on the way: workers, the driver, the meter. The digest stays the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_mining import TinyCorpus
from transformers import PreTrainedTokenizerBase

from tasks.lease import ClusterLease
from tasks.stage import Artifact
from umim_core.config import ClusterConfig, MiningConfig

CHECKOUT = Path(__file__).resolve().parents[2]
MANY_TASKS = MiningConfig(block_tokens=600)  # a hundred tasks for 60,000 tokens
# Titles that Ray gives its workers: what they run now.
MAP, SHUFFLE, GROUPS = "ray::MapBatches(local)", "ray::reduce", "ray::MapBatches(total)"


@pytest.fixture(scope="module")
def lease() -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as found:
        found.ensure()
        yield found


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer, 60_007)


@pytest.fixture(scope="module")
def undisturbed(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    return corpus.count(tmp_path_factory.mktemp("undisturbed"), lease, MANY_TASKS)


def titles(parent: psutil.Process) -> dict[psutil.Process, str]:
    """Return what the processes below one call themselves."""
    found: dict[psutil.Process, str] = {}
    for process in parent.children(recursive=True):
        try:
            found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


class Killer:
    """Kill workers of this process's cluster that are busy with something.

    Args:
        prefix: What the title of a victim begins with.
        times: How many to kill.
        seed: Of the moments and the victims.
    """

    def __init__(self, prefix: str, times: int, seed: int) -> None:
        self.killed: list[str] = []
        self._prefix, self._times, self._random = prefix, times, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        wait = self._random.uniform(0, 0.3)
        while len(self.killed) < self._times and not self._stop.wait(wait):
            busy = [p for p, title in titles(psutil.Process()).items() if self._busy(title)]
            wait = 0.005
            if busy:
                victim = self._random.choice(busy)
                try:
                    title = " ".join(victim.cmdline())
                    if self._busy(title):
                        victim.kill()
                        self.killed.append(title)
                        wait = self._random.uniform(0, 0.3)
                except psutil.Error:
                    continue

    def _busy(self, title: str) -> bool:
        return title.startswith(self._prefix) and not title.startswith("ray::IDLE")


@pytest.mark.parametrize(
    ("doing", "seed"),
    [
        (MAP, 0),
        *(
            pytest.param(doing, seed, marks=pytest.mark.full)
            for doing in (MAP, "ray::_split", "ray::reduce", GROUPS, "ray::")
            for seed in range(1, 5)
        ),
    ],
)
def test_killed_workers_leave_the_digest_alone(
    corpus: TinyCorpus,
    lease: ClusterLease,
    undisturbed: Artifact,
    tmp_path: Path,
    doing: str,
    seed: int,
) -> None:
    with Killer(doing, times=2, seed=seed) as killer:
        counted = corpus.count(tmp_path, lease, MANY_TASKS)
        finished = time.monotonic()
    assert killer.killed, f"no worker was killed: {doing} {seed} {finished}"
    assert counted.digest == undisturbed.digest, (doing, seed, killer.killed)
