"""Checks of a cluster that others started: every node has the driver's code and sees its artifacts.

They are made when the cluster is joined, before the first task, by a task on each node that needs
no core. Python on a node imports `tasks` and `umim_core` from wherever it was started.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.cluster.worker_errors import first_cause
from umim_core.errors import ClusterError, require
from umim_core.store.artifacts import json_digest, sha256_file
from umim_core.store.disk import not_shared

ANSWER_SECONDS: Final = 30.0  # a worker process starts and imports in a few
_SAME_CODE: Final = "every node must run the code of the driver"
_SOURCES: Final = ("umim_core", "tasks", "flows")
_Answer = tuple[dict[str, str], bool]


@dataclass(frozen=True)
class CodeIdentity:
    checkout: str  # folder that holds the packages
    sources: str  # SHA-256 of their Python files
    commit: str  # of the checkout; empty outside git
    lock: str  # SHA-256 of the list of packages that it is tested with; empty if absent
    host: str


@cache
def code_identity() -> CodeIdentity:
    lock = CHECKOUT / "requirements" / "lock.txt"
    return CodeIdentity(
        str(CHECKOUT),
        sources_digest(CHECKOUT),
        _commit(CHECKOUT),
        sha256_file(lock) if lock.is_file() else "",
        socket.gethostname(),
    )


def sources_digest(checkout: Path) -> str:
    files = sorted(path for name in _SOURCES for path in (checkout / name).rglob("*.py"))
    sums = {path.relative_to(checkout).as_posix(): sha256_file(path) for path in files}
    return json_digest(sums)


def _commit(checkout: Path) -> str:
    command = ["git", f"--git-dir={checkout / '.git'}", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()  # noqa: S603  our own command
    except OSError:  # no git
        return ""


def check_nodes(folder: Path) -> None:
    """Refuse the cluster that this process is connected to if a node differs.

    Args:
        folder: A folder of the artifact root, which every node must see.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # No cache of a file system can know a name that is random.
    with tempfile.TemporaryDirectory(prefix="look-", dir=folder) as seen:
        answers = _ask(seen)
    require_same_code({node: CodeIdentity(**code) for node, (code, _) in answers.items()})
    blind = [node for node, (_, sees) in sorted(answers.items()) if not sees]
    if blind:
        raise not_shared(folder.parent, f"node {', '.join(blind)}")


def require_same_code(nodes: Mapping[str, CodeIdentity]) -> None:
    ours = code_identity()
    remedy = "Bring its checkout to the same state, or start its Ray in this one."
    for node, theirs in sorted(nodes.items()):
        other = "sources" if theirs.sources != ours.sources else "lock of packages"
        there, here = (
            f"{code.checkout} at {code.commit[:12] or 'no commit'}" for code in (theirs, ours)
        )
        same = (theirs.sources, theirs.lock) == (ours.sources, ours.lock)
        found = f"node {node}: other {other}, {there}; here {here}"
        require(same, ClusterError, _SAME_CODE, found, remedy)


def _ask(folder: str) -> dict[str, _Answer]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    answer = ray.remote(num_cpus=0, max_retries=0)(_answer)
    asked = {
        node["NodeManagerAddress"] + ":" + str(node["NodeManagerPort"]): answer.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folder)
        for node in ray.nodes()
        if node["Alive"]
    }
    answers = {}
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=ANSWER_SECONDS)
        except GetTimeoutError as error:
            rule = f"every node must answer in {ANSWER_SECONDS:.0f} s"
            remedy = "End its Ray if it is gone, or give it memory for a worker process."
            raise ClusterError(rule, node, remedy) from error
        except RayError as error:  # such as a module that it cannot import
            cause = first_cause(error)
            found = f"node {node}: {type(cause).__name__}: {cause}"
            remedy = "Start its Ray from a checkout, with the environment of the lock."
            raise ClusterError(_SAME_CODE, found, remedy) from error
    return answers


def _answer(folder: str) -> _Answer:
    """Say, on a node, what it runs, and whether it sees a folder."""
    return asdict(code_identity()), Path(folder).is_dir()
