"""The ``umim`` command: mine, train, compress text, generate, measure perplexity.

With ``--json`` a command prints one JSON document on stdout and nothing else. Errors go to stderr;
the exit status is 1 for a broken rule (typed errors), 2 for wrong usage.
"""

from __future__ import annotations

import logging
import os
import sys

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.bench_command import bench
from umim_core.cli.console_output import JsonFlag, VersionFlag, emit, telling
from umim_core.cli.demo_command import demo
from umim_core.cli.documented import AtLeast0, Checkpoint, Commands, MaybeArgument, Page, command
from umim_core.cli.export_command import export
from umim_core.cli.generate_command import generate
from umim_core.cli.make_commands import import_release, init
from umim_core.cli.mine_command import mine
from umim_core.cli.path_command import baselines, fetch, path, task_text
from umim_core.cli.ppl_command import ppl
from umim_core.cli.prune_command import prune
from umim_core.cli.report_command import report
from umim_core.cli.rules_command import rules
from umim_core.cli.serve_command import serve
from umim_core.cli.train_command import train
from umim_core.cli.tune_command import tune

app = typer.Typer(
    name="umim",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    # Before torch is loaded: spinning OpenMP threads made a training step eight times slower on two
    # virtual cores (77 s against 9.7 s).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    with telling("umim"):
        app()


@app.callback()
def _options(version: VersionFlag = False) -> None:
    """Shorten prompts and KV caches of a frozen language model by merging frequent token spans."""


def compress(
    text: MaybeArgument = None,
    checkpoint: Checkpoint = None,
    raw_tail: AtLeast0 = 0,
    html: Page = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which spans of a text are merged.

    Options:
        text: Text; '-' or nothing reads stdin.
        raw_tail: Last tokens that stay raw; 16, for example.
    """
    shared.check_page(html)
    source = shared.given_text(text)
    from umim_core.checkpoint.checkpoint_files import default_checkpoint
    from umim_core.model.compression import compress_text

    name = default_checkpoint() if checkpoint is None else checkpoint
    compression = compress_text(source, name, raw_tail=raw_tail)
    if html is not None:
        shared.write_page(html, "umim compress", compression.html())
    if not as_json:
        compression.show()
        return
    names = ("units", "unit_lengths", "spans", "token_reduction")
    found = {name: getattr(compression, name) for name in names}
    emit({"tokens": len(compression.ids)} | found, [], as_json)


for _command in (
    demo, generate, report, tune, bench, mine, rules, init, prune, train, export, ppl, path,
    task_text, serve, fetch, baselines, compress,
):  # fmt: skip
    app.command()(command(_command))
app.command("import")(command(import_release))
