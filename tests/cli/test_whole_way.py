"""A model and texts of one's own: every command that is printed runs as it stands, to lm-eval."""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from support.command_line import Result, Umim
from support.gguf_files import tiny_bpe, tiny_llama, write_gguf
from support.processes import output_of

WORDS = tuple("the cat sat on a mat and dog ran over log while it was not sure".split())  # noqa: SIM905
COMMANDS = Path(sys.executable).parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three texts, a model in a directory and one in a GGUF file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PATH", f"{COMMANDS}{os.pathsep}{os.environ['PATH']}")
    chance = random.Random(3)
    (tmp_path / "my texts").mkdir()
    for name in "abc":
        text = " ".join(chance.choices(WORDS, range(len(WORDS), 0, -1), k=1500))
        (tmp_path / "my texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    pipeline = tiny_bpe()
    model = tiny_llama(pipeline, max_position_embeddings=1024)
    write_gguf(tmp_path / "own.gguf", model, pipeline, kind="Q8_0")
    model.save_pretrained(tmp_path / "own")
    (tmp_path / "pipeline.json").write_text(json.dumps(pipeline), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "pipeline.json"), eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(tmp_path / "own")
    return tmp_path


def printed(done: Result) -> dict[str, str]:
    """Commands that a result ends with, by program and subcommand."""
    lines = [line.strip() for line in done.out.splitlines() if line.startswith("  ")]
    return {" ".join(line.split()[:2]): line for line in lines}


def run(umim: Umim, line: str) -> Result:
    """Run a printed line of ``umim`` as a shell would cut it."""
    done = umim(*shlex.split(line)[1:])
    assert done.code == 0, done.err
    return done


def questions(folder: Path) -> Path:
    folder.mkdir()
    row = {"id": "1", "context": "the cat sat on a mat", "choices": ["a cat", "a dog"], "gold": 1}
    for split in ("train", "valid", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("model", ["own.gguf", "own"], ids=["gguf", "directory"])
def test_three_commands_lead_to_text_and_the_fourth_to_lm_eval(
    model: str, place: Path, umim: Umim
) -> None:
    texts = [f"my texts/{name}.txt" for name in "abc"]  # as a shell writes my\ texts/*.txt out
    mined = umim("mine", *texts, "--tokenizer", model, "--out", "rules", "--segment-length", "64")
    assert mined.code == 0, mined.err
    assert "rules written to rules" in mined.out
    command = printed(mined)["umim train"]
    assert command.startswith(f"umim train {model} 'my texts/a.txt' 'my texts/b.txt' ")
    trained = run(umim, f"{command} --steps 50")
    assert f"checkpoint: {place / 'rules-trained' / 'checkpoint'}" in trained.out
    assert ("Q8_0 99%" in trained.out) == (model == "own.gguf")
    assert "Once upon a time" in run(umim, printed(trained)["umim generate"]).out
    data = json.dumps({"task_data": str(questions(place / "task"))})
    command = [*shlex.split(printed(trained)["lm_eval --model"]), "--metadata", data]
    shown = output_of(*command, cwd=place, HF_HUB_OFFLINE="1")
    assert "|umim_docstrings|" in shown and "rules-trained" in shown
