"""``python -m flows serve``: a checkpoint behind OpenAI's interface, in several replicas."""

from __future__ import annotations

import signal
import socket
from typing import Annotated

import typer

from umim_core.cli import serve_command as shared
from umim_core.cli.prompt_input import DeviceOption, DtypeOption
from umim_core.errors import ConfigError


def serve(
    checkpoint: Annotated[
        str | None, typer.Argument(help="As of umim serve; every machine must be able to load it.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas, or the fewest of them.")] = 2,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Let their number follow the length of the queue up to this."),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPU cores of a replica.")] = 1.0,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of a replica; give --device cuda.")] = 0,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster, host:port or auto; by default this machine.")
    ] = None,
    host: shared.HostOption = "127.0.0.1",
    port: shared.PortOption = 8000,
    api_key_env: shared.KeyOption = None,
    model_name: shared.NameOption = None,
    merge: shared.MergeOption = None,
    max_rows: shared.RowsOption = 16,
    max_waiting: shared.WaitingOption = 256,
    prefix_cache_mb: shared.CacheOption = 1024,
    max_new_tokens: shared.TokensOption = 1024,
    max_request_bytes: shared.BytesOption = 4 << 20,
    answer_seconds: shared.SecondsOption = 600.0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Serve a checkpoint as `umim serve` does, by replicas of its engine on a Ray cluster."""
    token = shared.secret(api_key_env, "--api-key-env")
    shared.check_bind(host, token)
    _check_free(host, port)
    limits = shared.limits_of(max_new_tokens, max_request_bytes, answer_seconds)
    from tasks.cluster.replicas import Replicas, replicated
    from umim_core.serving.engine_app import EngineServer
    from umim_core.serving.engine_worker import BatchSizes

    load = {"checkpoint": checkpoint, "name": model_name, "merge": merge}
    load |= {"dtype": dtype, "device": device}
    sizes = BatchSizes(max_rows, max_waiting, prefix_cache_mb << 20)
    with replicated(load, sizes, Replicas(replicas, max_replicas, cpus, gpus, address)) as engine:
        signal.set_wakeup_fd(-1)  # at TERM the server ends open answers first, then the run stops
        shared.run_app(EngineServer(engine, limits).app(token), host, port)


def _check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before replicas start."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise ConfigError(
            "the server must be able to listen on --host and --port",
            f"{host}:{port} ({error})",
            "Stop what listens there, or give another --port.",
        ) from error
