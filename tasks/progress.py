"""A progress bar for training that runs elsewhere: rank 0 leaves a note, the driver shows it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_NOTE = "progress.json"
_POLL_SECONDS = 0.5


def leave_note(state: Path, step: int, total: int, text: str) -> None:
    """Write where training stands; a reader sees the old note or the new one, never half of it."""
    state.mkdir(parents=True, exist_ok=True)
    draft = state / f"{_NOTE}.tmp"
    draft.write_text(json.dumps([step, total, text]), encoding="utf-8")
    draft.replace(state / _NOTE)


@contextmanager
def progress_bar(state: Path) -> Iterator[None]:
    """Show the notes of a training as a bar on stderr while the block runs; only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("          {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    done = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("training", total=None)

        def follow() -> None:
            while not done.wait(_POLL_SECONDS):
                if (state / _NOTE).exists():
                    step, total, text = json.loads((state / _NOTE).read_text(encoding="utf-8"))
                    bar.update(shown, completed=step, total=total, description=text)

        watcher = threading.Thread(target=follow, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
