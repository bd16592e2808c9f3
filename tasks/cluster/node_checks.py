"""Checks of a cluster that others started: every node has the driver's code and artifact root.

They are made when the cluster is joined, before the first task, by a task on each node that needs
no core. Python on a node imports `tasks` and `umim_core` from wherever it was started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tasks.cluster.code_identity import CodeIdentity, code_identity
from umim_core.errors import ClusterError
from umim_core.store.disk import not_shared

ANSWER_SECONDS: Final = 30.0  # a worker process starts and imports in a few
_SAME_CODE: Final = "every node must run the code of the driver"


def check_nodes(folder: Path | None) -> None:
    """Refuse the cluster that this process is connected to if a node differs.

    Args:
        folder: A folder of the artifact root, which every node must see; None for no such need.

    Raises:
        ClusterError: If a node has other sources or another lock of packages than this process, has
            none of them, does not see the folder, or does not answer in ``ANSWER_SECONDS``.
    """
    if folder is None:
        _check(None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    # No cache of a file system can know a name that is random.
    with tempfile.TemporaryDirectory(prefix="look-", dir=folder) as seen:
        _check(Path(seen))


def _check(folder: Path | None) -> None:
    answers = _ask(folder)
    require_same_code({node: CodeIdentity(**code) for node, (code, _) in answers.items()})
    blind = sorted(node for node, (_, sees) in answers.items() if not sees)
    if folder is not None and blind:
        raise not_shared(folder.parent, f"node {', '.join(blind)}")


def require_same_code(nodes: Mapping[str, CodeIdentity]) -> None:
    """Refuse nodes that run other code than this process.

    Raises:
        ClusterError: If one does; the message names its checkout and commit, and ours.
    """
    ours = code_identity()
    for node, theirs in sorted(nodes.items()):
        for what, here, there in (
            ("sources", ours.sources, theirs.sources),
            ("lock of packages", ours.lock, theirs.lock),
        ):
            if here != there:
                raise ClusterError(
                    _SAME_CODE,
                    f"node {node}: other {what}, {_place(theirs)}; here {_place(ours)}",
                    "Bring its checkout to the same state, or start its Ray in this one.",
                )


def _place(code: CodeIdentity) -> str:
    return f"{code.checkout} at {code.commit[:12] or 'no commit'}"


def _ask(folder: Path | None) -> dict[str, tuple[dict[str, str], bool]]:
    """Return what each living node answers, by its address."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tasks.cluster.ray_errors import first_cause

    answer = ray.remote(num_cpus=0, max_retries=0)(_answer)
    asked = {
        node["NodeManagerAddress"] + ":" + str(node["NodeManagerPort"]): answer.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(None if folder is None else str(folder))
        for node in ray.nodes()
        if node["Alive"]
    }
    answers = {}
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=ANSWER_SECONDS)
        except GetTimeoutError as error:
            raise ClusterError(
                f"every node must answer in {ANSWER_SECONDS:.0f} s",
                node,
                "End its Ray if it is gone, or give it memory for a worker process.",
            ) from error
        except RayError as error:  # such as a module that it cannot import
            cause = first_cause(error)
            raise ClusterError(
                _SAME_CODE,
                f"node {node}: {type(cause).__name__}: {cause}",
                "Start its Ray from a checkout, with the environment of the lock.",
            ) from error
    return answers


def _answer(folder: str | None) -> tuple[dict[str, str], bool]:
    """Say, on a node, what it runs and whether it sees a folder."""
    return asdict(code_identity()), folder is None or Path(folder).is_dir()
