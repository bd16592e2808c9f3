"""``umim report``: what a log of requests holds, and what merging would save of it."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, log_lines
from umim_core.cli.documented import Page
from umim_core.errors import CorpusError, require

if TYPE_CHECKING:
    from umim_core.traffic.report import TrafficReport
    from umim_core.traffic.requests import Left

_SHAPE: Final = "llama-3.1-8b"


def report(
    names: Annotated[list[str], typer.Argument(metavar="DIR...")],
    tokenizer: Annotated[str, typer.Option()],
    shape: str = _SHAPE,
    gpu_gib: Annotated[float, typer.Option(min=1, max=1e6)] = 80.0,
    kind: Literal["text", "jsonl"] | None = None,
    html: Page = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what merged spans would save of your requests: no weights, no training, no text shown.

    Spans are counted in four fifths of the conversations and measured on the others. Tokens of the
    template around the messages are not counted.

    Options:
        names: Request logs (JSON Lines with messages and tools) or texts: files, folders.
        tokenizer: Of the model: name, directory or hub id.
        shape: Model whose cache is counted: a known shape, or a local model.
        gpu_gib: Memory of its GPU or GPUs, GiB.
        kind: What files hold whose ending is other.
    """
    shared.check_page(html)
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.progress import counted
    from umim_core.traffic.report import model_shape, traffic_report
    from umim_core.traffic.requests import Left, read_requests

    model_shape(shape)  # a name that says nothing is refused before a long log is read
    left = Left()
    log_lines("umim.progress")
    requests = list(counted(read_requests(tuple(names), kind, left), "requests read"))
    rule = "a log must hold at least one request"
    found = "; ".join(left.lines()) or "none"
    remedy = "Log requests as JSON Lines with messages and tools (jq -c . FILE), or name texts."
    require(bool(requests), CorpusError, rule, found, remedy)
    measured = traffic_report(requests, load_tokenizer(tokenizer), shape, gpu_gib)
    lines = _lines(measured, left)
    if html is not None:
        body = f"<pre style='white-space:pre-wrap'>{escape(chr(10).join(lines))}</pre>"
        shared.write_page(html, "umim report", body)
    emit({**asdict(measured), "left_out": dict(left.reasons)}, lines, as_json)


def _lines(measured: TrafficReport, left: Left) -> list[str]:
    from umim_core.progress import numbered
    from umim_core.traffic.report import NAMES, ROWS

    total = measured.prompt_tokens
    lines = [
        f"{numbered(measured.requests, 'request')} of "
        f"{numbered(measured.conversations, 'conversation')}, "
        f"{total:,} prompt tokens, {measured.reply_tokens:,} tokens of replies",
        *left.lines("not counted: "),
        "",
        f"{'prompt tokens':<22}{'tokens':>12}{'share':>8}{'json':>8}{'code':>8}{'prose':>8}",
    ]
    for role, kinds in sorted(measured.tokens.items(), key=lambda item: -sum(item[1].values())):
        count = sum(kinds.values())
        shares = "".join(f"{kinds.get(k, 0) / count:>8.0%}" for k in ("json", "code", "prose"))
        lines.append(f"{NAMES[role]:<22}{count:>12,}{count / total:>8.1%}{shares}")
    lines += [
        "",
        f"{measured.digits:.1%} of the prompt tokens hold digits and stay raw; "
        f"a warm prefix cache serves {measured.cached:.1%}.",
    ]
    if measured.savings:
        lines += [
            "",
            f"Saved of {measured.held_out:,} unseen requests (in brackets: of what a warm prefix "
            "cache leaves)",
            f"{'spans of up to':<16}" + "".join(f"{f'{rows:,} spans':>18}" for rows in ROWS),
        ]
        for longest in dict.fromkeys(s.longest for s in measured.savings):
            by_rows = {s.rows: s for s in measured.savings if s.longest == longest}
            cells = (f"{by_rows[rows].all:.1%} ({by_rows[rows].uncached:.1%})" for rows in ROWS)
            lines.append(f"{f'{longest} tokens':<16}" + "".join(f"{cell:>18}" for cell in cells))
        best = max(measured.savings, key=lambda s: s.all)
        roles = ", ".join(f"{NAMES[role]} {share:.0%}" for role, share in best.roles.items())
        lines += [f"by the best of them: {roles}"] if roles else []
    memory = measured.memory
    lines += [
        "",
        f"{memory.shape}: {memory.token_bytes / 1024:,.0f} KiB of keys and values per token; "
        f"{memory.gpu_gib:g} GiB hold {memory.requests:,} requests of this length, "
        f"merged {memory.merged:,}",
    ]
    return [*lines, "", measured.verdict]
