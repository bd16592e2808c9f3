"""The command ``umim`` in this process, an artifact root of its own, and a folder to work in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.command_line import LETTERS, Umim, console
from support.tiny_models import tiny_model, word_tokenizer

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


@pytest.fixture
def umim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Umim:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    return console(monkeypatch, capsys)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one-letter words and the word 7, with a chat template; left alone."""
    folder = tmp_path_factory.mktemp("letters")
    tiny_model().save_pretrained(folder)
    tokenizer = word_tokenizer(LETTERS)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ' ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def workplace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Path,
    tokenizer_folder: Path,
) -> Path:
    """The current folder: a checkpoint, its model, rules, a tokenizer, a text that holds them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").symlink_to(tiny_checkpoint)
    (tmp_path / "model").symlink_to(tiny_checkpoint.parent / "backbone")
    (tmp_path / "tokenizer").symlink_to(tokenizer_folder)
    (tmp_path / "rules").symlink_to(tiny_checkpoint / "rules")
    chosen = np.random.default_rng(7).integers(0, len(SPANS), 300)
    words = [f"w{token}" for number in chosen for token in (*SPANS[number], 10 + number)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    return tmp_path
