"""``umim serve``: a model behind OpenAI's interface, or merged prompts for another engine."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import log_lines
from umim_core.errors import ConfigError, MissingExtraError, require

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from umim_core.serving.guard import Limits

_OF_ENGINE: Final[tuple[str, ...]] = (
    "model_name", "merge", "max_rows", "max_waiting", "prefix_cache_mb", "dtype", "device",
    "report_cached_tokens",
)  # fmt: skip
_OF_GATEWAY: Final[tuple[str, ...]] = ("export", "upstream_key_env", "upstream_masks")

HostOption = Annotated[
    str, typer.Option(help="Address to listen on; others than loopback need --api-key-env.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
KeyOption = Annotated[
    str | None,
    typer.Option(help="Environment variable with the bearer token that clients must show."),
]
NameOption = Annotated[
    str | None, typer.Option(help="How requests call the model; by default its own name.")
]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows that run at once.")]
WaitingOption = Annotated[int, typer.Option(min=1, help="Requests that may wait; others get 503.")]
CacheOption = Annotated[
    int, typer.Option(min=0, help="Memory for the columns of earlier turns, in MB.")
]
TokensOption = Annotated[
    int, typer.Option(min=1, help="Most tokens of an answer of our own engine, and the default.")
]
BytesOption = Annotated[int, typer.Option(min=1, help="Largest body.")]
SecondsOption = Annotated[
    float, typer.Option(min=0.1, help="An answer that takes longer ends with an error.")
]
CachedOption = Annotated[
    bool,
    typer.Option(
        "--report-cached-tokens",
        help="Tell clients how much of a prompt was reused, which may be another client's.",
    ),
]


def serve(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            help="A name that umim path lists, a directory or a hub repository; by default "
            "umim-smollm2-135m-adapters."
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(help="Merge prompts for this server (vLLM, llama.cpp, SGLang), an URL."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="With --upstream: what umim export wrote.")
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="The name is a plain model: nothing is merged.")
    ] = False,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key_env: KeyOption = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the token that the upstream wants."),
    ] = None,
    upstream_masks: Annotated[
        bool,
        typer.Option(
            "--upstream-masks",
            help="The upstream never writes ids of spans; otherwise each request carries a logit "
            "bias against them.",
        ),
    ] = False,
    model_name: NameOption = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file, for a tokenizer without a chat template.")
    ] = None,
    merge: shared.MergeOption = None,
    max_rows: RowsOption = 16,
    max_waiting: WaitingOption = 256,
    prefix_cache_mb: CacheOption = 1024,
    max_new_tokens: TokensOption = 1024,
    max_request_bytes: BytesOption = 4 << 20,
    answer_seconds: SecondsOption = 600.0,
    report_cached_tokens: CachedOption = False,
    dtype: shared.DtypeOption = "auto",
    device: shared.DeviceOption = "cpu",
) -> None:
    """Serve a checkpoint over HTTP as OpenAI does: chats and completions, whole or streamed.

    Metrics are under /metrics, a sign of life under /health. The header `x-umim-merge: off` leaves
    a prompt raw. With --upstream the model runs elsewhere and only its prompts are merged here.
    """
    of_other, rule = _OF_GATEWAY, "must come with --upstream"
    if upstream is not None:
        of_other = _OF_ENGINE
        rule = "must be given to the server that runs the model, which --upstream names"
    shared.refuse_named(context, of_other, rule)
    token = secret(api_key_env, "--api-key-env")
    check_listening(host, port, token)
    template = None if chat_template is None else shared.text_of(chat_template, "--chat-template")
    limits = limits_of(max_new_tokens, max_request_bytes, answer_seconds, report_cached_tokens)
    if upstream is None:
        from umim_core.serving.engine_server import EngineServer
        from umim_core.serving.local_engine import BatchSizes, LocalEngine, Served

        served = Served.load(
            checkpoint, base=base, name=model_name, merge=merge, dtype=dtype, device=device
        )
        if template is not None:
            served.backbone.require_tokenizer().chat_template = template
        sizes = BatchSizes(max_rows, max_waiting, prefix_cache_mb << 20)
        app = EngineServer(LocalEngine(served, sizes), limits).app(token)
    elif export is None or checkpoint is not None or base:
        rule = "--upstream merges by the spans of an exported model, and runs none"
        found = f"--export {export}, checkpoint {checkpoint}"
        raise ConfigError(rule, found, "Give --upstream URL --export DIR.")
    else:
        from umim_core.backbone.fingerprint import tokenizer_fingerprint
        from umim_core.backbone.tokenizer_files import load_tokenizer
        from umim_core.serving.gateway import Gateway
        from umim_core.serving.prompt_merger import PromptMerger

        tokenizer = load_tokenizer(str(export), local_files_only=True)
        merger = PromptMerger.load(export, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
        if template is not None:
            tokenizer.chat_template = template
        key = secret(upstream_key_env, "--upstream-key-env")
        app = Gateway(upstream, tokenizer, merger, limits, key, upstream_masks).app(token)
    run_app(app, host, port)


def secret(variable: str | None, option: str) -> str | None:
    """Return the value of an environment variable that is named."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    rule = f"{option} must name a variable that is set, to one line of text"
    require(value.isprintable() and value != "", ConfigError, rule, variable, "Export it first.")
    return value


def check_listening(host: str, port: int, token: str | None) -> None:
    """Refuse an address before a model is loaded: open to others without a token, or taken."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    rule = "a server that other machines reach needs a token"
    remedy = "Name a variable that holds one by --api-key-env, or listen on 127.0.0.1."
    require(loopback or token is not None, ConfigError, rule, f"--host {host}", remedy)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        rule = "the server must be able to listen on --host and --port"
        remedy = "Stop what listens there, or give another --port."
        raise ConfigError(rule, f"{host}:{port} ({error})", remedy) from error


def limits_of(
    new_tokens: int, request_bytes: int, answer_seconds: float, report_cached: bool
) -> Limits:
    """Return the bounds of requests, or say what is not installed."""
    try:
        import httpx  # noqa: F401
        import uvicorn  # noqa: F401

        from umim_core.serving.guard import Limits
    except ImportError as error:
        rule = "umim serve needs starlette, uvicorn, httpx and prometheus-client"
        raise MissingExtraError(rule, str(error), "Install umim[serve].") from error
    return Limits(
        request_bytes=request_bytes,
        answer_seconds=answer_seconds,
        new_tokens=new_tokens,
        report_cached=report_cached,
    )


def run_app(app: Starlette, host: str, port: int) -> None:
    """Serve an application until TERM or Ctrl-C, with a log on stderr."""
    from umim_core.serving.connections import BoundedServer

    log_lines("umim.serve")
    log_lines("uvicorn.error")
    server = BoundedServer(app, host, port)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise typer.Exit(3)  # uvicorn said why
