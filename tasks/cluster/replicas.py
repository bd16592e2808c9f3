"""Several replicas of one model behind one address, as a Ray Serve deployment.

    clients -> this process            the routes, limits and token of ``umim serve``
            -> Ray Serve's handle      queue, balance, health checks, autoscaling
            -> replicas, 1 or more     an engine each, with its own batch and kept columns

Answers come back event by event, so a replica that dies ends its own answers and no other: before
the first token with status 503, later with an error as the stream's last event. Ray Serve starts
another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.concurrency import run_in_threadpool

from tasks.cluster.ray_cluster import listening_addresses, ray_cluster, require_loopback
from tasks.cluster.stopping import on_stop
from umim_core.errors import ClusterError, ConfigError, MissingExtraError, require
from umim_core.serving.guard import ServerMetrics
from umim_core.serving.local_engine import BatchSizes, Event, LocalEngine, Served
from umim_core.serving.openai_api import AnyBody, try_later
from umim_core.serving.tool_calls import Calls

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import DeploymentStatusOverview

_HEALTH_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 600.0  # for open answers of a replica that is no longer needed
_MIB: Final = 1 << 20
_log: Final = logging.getLogger("umim.serve")


@dataclass(frozen=True)
class Replicas:
    count: int = 2  # or the fewest
    most: int | None = None  # as the queue grows; ``count`` by default
    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None  # as of ``ray_cluster``

    def options(self, sizes: BatchSizes) -> dict[str, Any]:
        most = self.most or self.count
        rule, found = "--max-replicas must be at least --replicas", f"{most} and {self.count}"
        require(most >= self.count, ConfigError, rule, found, "Raise it, or leave it out.")
        return {
            "autoscaling_config": {
                "min_replicas": self.count,
                "max_replicas": most,
                "target_ongoing_requests": sizes.max_rows,
            },
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_ongoing_requests": sizes.max_rows,
            "max_queued_requests": sizes.max_waiting,
            "max_constructor_retry_count": 1,
            "health_check_period_s": _HEALTH_SECONDS,
            "graceful_shutdown_timeout_s": _GRACE_SECONDS,
        }


class EngineReplica:
    """One replica; Ray Serve makes it. ``load`` are arguments of ``Served.load``."""

    def __init__(self, load: dict[str, Any], sizes: BatchSizes, loopback: bool) -> None:
        if loopback:  # for the socket that Ray Serve opens, Ray 2.60 has no option
            from ray.serve._private import replica

            bind = replica.add_port_to_grpc_server
            replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")
        self._engine = LocalEngine(Served.load(**load), sizes)
        self._engine.start()

    def check_health(self) -> None:
        """Raise an error if the engine has ended; Ray Serve then replaces the replica."""
        if not self._engine.runs:
            raise ClusterError("the engine of a replica must run", "it has stopped")

    def described(self) -> tuple[str, int | None, frozenset[str] | None]:
        return self._engine.name, self._engine.positions, self._engine.call_marks

    async def events(
        self, body: AnyBody, calls: Calls | None, merging: bool, new_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """Give what happens to a request; see ``LocalEngine``."""
        async with aclosing(self._engine.events(body, calls, merging, new_tokens)) as events:
            async for event in events:
                yield event


class ReplicatedEngine:
    """The replicas as one model; see ``AnswerEngine``."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        name: str,
        positions: int | None,
        call_marks: frozenset[str] | None,
    ) -> None:
        self._handle = handle.options(stream=True)
        self._ended = False
        self.name, self.positions, self.call_marks = name, positions, call_marks
        self.metrics = ServerMetrics()

    def end(self) -> None:
        """Use Ray no more: a call of it would start a cluster where none runs."""
        self._ended = True

    def life(self) -> AbstractAsyncContextManager[None]:
        """The replicas live longer than the application: see ``replicated``."""
        return nullcontext()

    async def alive(self) -> bool:
        if self._ended:
            return False
        known = await run_in_threadpool(_deployments, self._handle.app_name)
        return any(one.replica_states.get("RUNNING") for one in known)

    async def events(
        self, body: AnyBody, calls: Calls | None, merging: bool, new_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """Give what happens to a request on one of the replicas; closing it frees the rows."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        if self._ended:
            yield try_later("unavailable", "the replicas must run", "they have ended")
            return
        answer = self._handle.events.remote(body, calls, merging, new_tokens)
        try:
            async for event in answer:
                yield event
        except BackPressureError:
            rule = "at most --max-waiting requests may wait for a replica"
            yield try_later("overloaded", rule, "more")
        except (RayError, DeploymentUnavailableError) as error:
            kind = type(error).__name__
            _log.warning("a replica failed a request: %s", kind)
            yield try_later("unavailable", "the replica that answers must run", kind)
        except (asyncio.CancelledError, GeneratorExit):
            answer.cancel()
            raise


def _deployments(application: str) -> list[DeploymentStatusOverview]:
    """Return what Ray Serve knows of an application; nothing where it does not answer."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return list(serve.status().applications[application].deployments.values())
    except (RayError, RayServeException, KeyError):
        return []


@contextmanager
def replicated(
    load: dict[str, Any], sizes: BatchSizes, replicas: Replicas
) -> Iterator[ReplicatedEngine]:
    """Give the model for the length of a block, once all replicas run, or the fewest.

    ``load`` are arguments of ``Served.load``. Requests beyond ``max_rows`` of a replica wait in
    this process, at most ``max_waiting`` of them.
    """
    options = replicas.options(sizes)
    try:
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
    except ImportError as error:
        raise MissingExtraError(
            "replicas need Ray Serve", str(error), "Install umim[pipeline,serve,replicas]."
        ) from error
    cores = max(1, math.ceil((replicas.most or replicas.count) * replicas.cpus))
    application = f"umim-{secrets.token_hex(4)}"  # others may serve on the same cluster
    with (
        ray_cluster(cores, replicas.address, object_store_bytes=200 * _MIB) as cluster,
        on_stop(partial(_delete, application)),
        ExitStack() as ends,
    ):
        ends.callback(_delete, application)
        deployment = serve.deployment(EngineReplica, **options)
        try:
            serve.start(proxy_location="Disabled")
            bound = deployment.bind(load, sizes, cluster.is_here)
            handle = serve.run(bound, name=application, route_prefix=None)
            ends.callback(handle.shutdown)  # or its next report to Ray Serve starts Ray again
            described = handle.described.remote().result()
        except (RuntimeError, RayError, RayServeException) as error:
            known = [one.message for one in _deployments(application)]
            last = "\n".join([str(error), *known]).strip().rpartition("\n")[2]
            raise ClusterError("all replicas must start", last) from error
        if cluster.is_here:
            require_loopback(listening_addresses())
        engine = ReplicatedEngine(handle, *described)
        ends.callback(engine.end)
        yield engine


def _delete(application: str) -> None:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        serve.delete(application, _blocking=False)
        serve.status()  # answered after the request before it has arrived
    except (RayError, RayServeException) as error:
        _log.warning("replicas of %s may run on: %s", application, type(error).__name__)
