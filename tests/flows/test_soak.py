"""A soak: random faults at random stages; never a wrong result, never a hang (reliability 50)."""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.faulty_disk import PAGE, Faults, leftovers
from support.tiny_pipeline import NOT_EQUAL, Call, Walk, walk_until
from support.training_processes import SECONDS, exit_codes, start_ranks
from umim_core.errors import UmimError

MINUTES = 4.0
# Places that every stage passes on its way to disk.
PLACES = tuple(
    f"umim_core.store.publication.{name}" for name in ("write_manifest", "flush_tree", "flush")
)


class Soak:
    """One fault after the other on copies of a finished run, whatever the seed draws."""

    def __init__(self, run: Walk, folder: Path, resize: Callable[[int], Path], seed: int) -> None:
        self.run, self.folder, self.resize = run, folder, resize
        self.rng = np.random.default_rng(seed)
        self.fired: Counter[str] = Counter()
        self.faults: tuple[Callable[[Call, Path], bool], ...] = (
            self.fail_a_write, self.fill_the_disk, self.kill, self.flip_a_byte,
        )  # fmt: skip

    def step(self, number: int) -> None:
        first = {call.name: call for call in reversed(self.run.calls)}
        calls = [call for name, call in first.items() if name not in NOT_EQUAL]
        call = calls[self.rng.integers(len(calls))]
        fault = self.faults[self.rng.integers(len(self.faults))]
        root = self.folder / str(number)
        fired = fault(call, root)
        self.fired[fault.__name__] += fired
        where = (number, fault.__name__, call.name)
        assert call.run(root).digest == call.artifact.digest, where
        # A process killed behind a publication leaves its lock file, which the kernel has freed.
        whole = {path.parent for path in root.glob("*/*/manifest.json")}
        freed = {f"{path.parent.name}/.{path.name}.lock" for path in whole}
        assert set(leftovers(root)) <= (freed if fault == self.kill else set()), where
        shutil.rmtree(root)

    def fail_a_write(self, call: Call, root: Path) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch)
            faults.arm(int(self.rng.integers(1, 40)))
            return self._refused(call, root) or faults.fired is not None

    def fill_the_disk(self, call: Call, root: Path) -> bool:
        disk = self.resize(PAGE * int(self.rng.integers(1, 12)))
        refused = self._refused(call, disk)
        for path in disk.iterdir():
            shutil.rmtree(path)
        return refused

    def kill(self, call: Call, root: Path) -> bool:
        """Kill a process that runs the recipe, with this stage and all behind it still to do."""
        later = {other.artifact.key for other in self.run.calls[self.run.calls.index(call) :]}
        shutil.copytree(self.run.root, root, ignore=shutil.ignore_patterns(*later))
        place = PLACES[self.rng.integers(len(PLACES))]
        when = ("before", "after")[self.rng.integers(2)]
        recipe = self.run.recipe.model_dump_json()
        [code] = exit_codes(start_ranks(root.parent, 1, walk_until, root, recipe, place, 1, when))
        assert code == -signal.SIGKILL, (root.parent / "rank-0.log").read_text("utf-8")[-2000:]
        return True

    def flip_a_byte(self, call: Call, root: Path) -> bool:
        """Damage a finished artifact: it is refused, and built again once it was removed."""
        shutil.copytree(call.artifact.path, root / call.name / call.artifact.key)
        [*files] = sorted(p for p in (root / call.name).rglob("*") if p.is_file())
        path = files[self.rng.integers(len(files))]
        data = bytearray(path.read_bytes())
        if not data:
            return False
        data[self.rng.integers(len(data))] ^= 1 << int(self.rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(UmimError):
            call.run(root)
        shutil.rmtree(root / call.name)
        return True

    @staticmethod
    def _refused(call: Call, root: Path) -> bool:
        try:
            digest = call.run(root).digest
        except UmimError:
            return True
        assert digest == call.artifact.digest
        return False


@pytest.mark.full
@pytest.mark.timeout(60 * MINUTES + 2 * SECONDS)
@pytest.mark.parametrize("seed", [0])
def test_random_faults_leave_every_result_as_it_was(
    tiny_run: Walk, small_disk: Callable[[int], Path], tmp_path: Path, seed: int
) -> None:
    soak = Soak(tiny_run, tmp_path / "roots", small_disk, seed)
    began, number = time.monotonic(), 0
    while time.monotonic() - began < 60 * MINUTES or len(soak.fired) < len(soak.faults):
        soak.step(number)
        number += 1
    print(f"seed {seed}: {number} faults, fired: {dict(soak.fired)}")
    assert all(soak.fired[fault.__name__] for fault in soak.faults), soak.fired
