"""``umim serve``: a model behind OpenAI's interface, or merged prompts for another engine."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import log_lines
from umim_core.cli.documented import AtLeast0, AtLeast1, MaybeArgument
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, MissingExtraError, require

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from umim_core.serving.guard import Limits
    from umim_core.serving.local_engine import BatchSizes

_OF_ENGINE: Final[tuple[str, ...]] = (
    "model_name", "merge", "max_rows", "max_waiting", "prefix_cache_mb", "dtype", "device",
    "report_cached_tokens",
)  # fmt: skip
_OF_GATEWAY: Final[tuple[str, ...]] = ("export", "upstream_key_env", "upstream_masks")


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, whom it answers, and how its own engine runs.

    Attributes:
        host: Address to listen on; others than loopback need --api-key-env.
        port: Port; 0 takes a free one.
        api_key_env: Environment variable with the bearer token that clients must show.
        model_name: How requests call the model; by default its own name.
        max_rows: Rows that run at once.
        max_waiting: Requests that may wait; others get 503.
        prefix_cache_mb: Memory for the columns of earlier turns, in MB.
        max_new_tokens: Most tokens of an answer of our own engine, and the default.
        max_request_bytes: Largest body.
        answer_seconds: An answer that takes longer ends with an error.
        report_cached_tokens: Tell clients how much of a prompt was reused, which may be another
            client's.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000
    api_key_env: str | None = None
    model_name: str | None = None
    merge: Merge | None = None
    max_rows: AtLeast1 = 16
    max_waiting: AtLeast1 = 256
    prefix_cache_mb: AtLeast0 = 1024
    max_new_tokens: AtLeast1 = 1024
    max_request_bytes: AtLeast1 = 4 << 20
    answer_seconds: Annotated[float, typer.Option(min=0.1)] = 600.0
    report_cached_tokens: bool = False
    dtype: shared.Dtype = "auto"
    device: str = "cpu"

    def token(self) -> str | None:
        """Return the token that clients must show, before a model is loaded.

        Refuse an address that is open to others without one, or taken.
        """
        token = secret(self.api_key_env, "--api-key-env")
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = self.host == "localhost"
        rule = "a server that other machines reach needs a token"
        remedy = "Name a variable that holds one by --api-key-env, or listen on 127.0.0.1."
        require(loopback or token is not None, ConfigError, rule, f"--host {self.host}", remedy)
        try:
            places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, _, _, _, address = places[0]
            socket.create_server(address[:2], family=family).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            rule = "the server must be able to listen on --host and --port"
            remedy = "Stop what listens there, or give another --port."
            raise ConfigError(rule, f"{self.host}:{self.port} ({error})", remedy) from error
        return token

    def limits(self) -> Limits:
        """Return the bounds of requests, or say what is not installed."""
        try:
            import httpx  # noqa: F401
            import uvicorn  # noqa: F401

            from umim_core.serving.guard import Limits
        except ImportError as error:
            rule = "umim serve needs starlette, uvicorn, httpx and prometheus-client"
            raise MissingExtraError(rule, str(error), "Install umim[serve].") from error
        return Limits(
            self.max_request_bytes,
            self.answer_seconds,
            self.max_new_tokens,
            self.report_cached_tokens,
        )

    def sizes(self) -> BatchSizes:
        from umim_core.serving.local_engine import BatchSizes

        return BatchSizes(self.max_rows, self.max_waiting, self.prefix_cache_mb << 20)

    def loading(self) -> dict[str, Any]:
        """Return arguments of ``Served.load``."""
        how = {"dtype": self.dtype, "device": self.device}
        return {"name": self.model_name, "merge": self.merge, **how}

    def run(self, app: Starlette) -> None:
        """Serve an application until TERM or Ctrl-C, with a log on stderr."""
        from umim_core.serving.connections import BoundedServer

        log_lines("umim.serve")
        log_lines("uvicorn.error")
        server = BoundedServer(app, self.host, self.port)
        with suppress(KeyboardInterrupt):
            server.run()
        if not server.started:
            raise typer.Exit(3)  # uvicorn said why


def serve(
    context: typer.Context,
    checkpoint: MaybeArgument = None,
    upstream: str | None = None,
    export: Path | None = None,
    base: bool = False,
    upstream_key_env: str | None = None,
    upstream_masks: bool = False,
    chat_template: Path | None = None,
    *,
    server: ServerOptions,
) -> None:
    """Serve a checkpoint over HTTP as OpenAI does: chats and completions, whole or streamed.

    Metrics are under /metrics, a sign of life under /health. The header `x-umim-merge: off` leaves
    a prompt raw. With --upstream the model runs elsewhere and only its prompts are merged here.

    Options:
        upstream: Merge prompts for this server (vLLM, llama.cpp, SGLang), an URL.
        export: With --upstream: what umim export wrote.
        base: The name is a plain model: nothing is merged.
        upstream_key_env: Environment variable with the token that the upstream wants.
        upstream_masks: The upstream never writes ids of spans; otherwise each request carries a
            logit bias against them.
        chat_template: A Jinja file, for a tokenizer without a chat template.
    """
    of_other, rule = _OF_GATEWAY, "must come with --upstream"
    if upstream is not None:
        of_other = _OF_ENGINE
        rule = "must be given to the server that runs the model, which --upstream names"
    shared.refuse_named(context, of_other, rule)
    token, key = server.token(), secret(upstream_key_env, "--upstream-key-env")
    template = None if chat_template is None else _template(chat_template)
    limits = server.limits()
    if upstream is None:
        from umim_core.serving.engine_server import EngineServer
        from umim_core.serving.local_engine import LocalEngine, Served

        served = Served.load(checkpoint, base=base, **server.loading())
        if template is not None:
            served.backbone.require_tokenizer().chat_template = template
        app = EngineServer(LocalEngine(served, server.sizes()), limits).app(token)
    elif export is None or checkpoint is not None or base:
        rule = "--upstream merges by the spans of an exported model, and runs none"
        found = f"--export {export}, checkpoint {checkpoint}, --base {base}"
        raise ConfigError(rule, found, "Give --upstream URL --export DIR.")
    else:
        from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
        from umim_core.serving.gateway import Gateway, address_of
        from umim_core.serving.prompt_merger import PromptMerger
        from umim_core.serving.span_files import RECORD

        address = address_of(upstream)
        rule = "--export must be a directory that umim export wrote"
        remedy = "Write one: umim export CHECKPOINT --out DIR."
        require((export / RECORD).is_file(), ConfigError, rule, str(export), remedy)
        merger = PromptMerger.load(export)  # before its tokenizer, which other folders have, too
        tokenizer = load_tokenizer(str(export), local_files_only=True)
        merger.rules.check_tokenizer(tokenizer_fingerprint(tokenizer))
        if template is not None:
            tokenizer.chat_template = template
        app = Gateway(address, tokenizer, merger, limits, key, upstream_masks).app(token)
    server.run(app)


def _template(path: Path) -> str:
    """Return a chat template; text that cannot write messages would be refused chat by chat."""
    text = shared.text_of(path, "--chat-template")
    writes = "{" in text and "messages" in text
    rule = "--chat-template must be a Jinja template, which reads messages"
    remedy = "Give a model's chat_template.jinja, say."
    require(writes, ConfigError, rule, f"{path}, which does not", remedy)
    return text


def secret(variable: str | None, option: str) -> str | None:
    """Return the value of an environment variable that is named."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    rule = f"{option} must name a variable that is set, to one line of text"
    require(value.isprintable() and value != "", ConfigError, rule, variable, "Export it first.")
    return value
