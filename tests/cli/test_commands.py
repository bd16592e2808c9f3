"""Commands from end to end that need no more than a tiny checkpoint: one test or two each."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from support.command_line import Umim, document
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.devices import fastest_dtype
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.registry import BASELINES
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.cli.demo_command import verdict
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.model_sources.model_cache import model_fault
from umim_core.model_sources.packaged_model import PACKAGED
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


def test_compress_prints_units_and_figures_of_an_argument_or_of_stdin(
    umim: Umim, tiny_checkpoint: Path
) -> None:
    found = document(umim("compress", TEXT, "-c", tiny_checkpoint, "--json"))
    assert found["unit_lengths"] == [2, 1, 3, 4, 1]
    assert found["spans"] == [[0, 2], [3, 3], [6, 4]]
    assert found["units"] == ["w1 w2", " w9", " w3 w4 w5", " w6 w7 w8 w9", " w1"]
    assert (found["tokens"], found["token_reduction"]) == (11, pytest.approx(6 / 11))
    for argument in ((), ("-",)):
        shown = umim("compress", *argument, "-c", tiny_checkpoint, stdin=TEXT.encode())
        figures = "11 tokens -> 5 units, 3 merged spans, token reduction 54.5%"
        assert shown.code == 0 and figures in shown.out


@pytest.mark.parametrize("name", embedded_names())
def test_path_prints_directories_by_name(umim: Umim, name: str) -> None:
    result = umim("path", name, "--part", "backbone")
    assert (result.code, result.out) == (0, f"{embedded_path(name, 'backbone')}\n")
    assert Path(result.out.strip(), "model.safetensors").is_file()
    found = document(umim("path", name, "--part", "backbone", "--json"))
    assert found == {"name": name, "part": "backbone", "path": result.out.strip()}
    (task,) = Path(umim("path", "--tasks").out.strip()).glob("umim_docstrings.yaml")
    assert document(umim("path", "--tasks", "--json")) == {"tasks": str(task.parent)}


def test_all_baselines_are_listed_with_what_they_save(umim: Umim) -> None:
    found = document(umim("baselines", "--json"))["baselines"]
    assert [one["name"] for one in found] == list(BASELINES)
    sides = {one["name"]: one["side"] for one in found}
    assert (sides["truncation"], sides["full-cache"]) == ("prompt", "cache")
    lines = umim("baselines").out.splitlines()
    assert [line.split()[:2] for line in lines] == [[one["name"], one["side"]] for one in found]


def test_task_texts_hold_answers_and_are_none_of_the_scored_prompts(
    umim: Umim, tmp_path: Path
) -> None:
    out, name, backbone = tmp_path / "texts.jsonl", "umim_ruler_1k", "umim-docs-llama"
    called = ("task-text", name, "--tokenizer", backbone, "--questions", 2, "--out", out)
    assert document(umim(*called, "--json"))["texts"] == 2
    texts = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    options, task = TaskOptions(task_questions=2), GENERATION_TASKS.find(name)
    for split, there in (("train", True), ("test", False)):
        rows = make_rows(task, options, load_tokenizer(backbone), split)
        found = [f"{r['prompt']} {r['answer_prefix']} {', '.join(r['references'])}" for r in rows]
        assert (found == texts) == bool(set(found) & set(texts)) == there


def test_ppl_agrees_with_the_library_and_prints_both_models(
    umim: Umim, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    called = ("ppl", tmp_path / "*.txt", "-c", tiny_checkpoint, "--dtype", "float32")
    found = document(umim(*called, "--json"))
    model = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    assert found["ppl_base"] == pytest.approx(model.perplexity(TEXT, merge="none"), rel=1e-5)
    assert found["ppl_umim"] == pytest.approx(model.perplexity(TEXT), rel=1e-5)
    assert (found["targets"], found["windows"]) == (10, 1)
    assert found["token_reduction"] == pytest.approx(6 / 11)
    head, base, ours, foot = umim(*called).out.splitlines()
    assert head.split() == ["token", "PPL", "bits/byte", "TR"]
    assert (base.split()[0], base.split()[-1], ours.split()[-1]) == ("base", "0.0%", "54.5%")
    assert "10 tokens" in foot and "1 windows of at most 512 tokens, 0 of context" in foot


def test_ppl_of_prompts_merges_as_generate_does(
    umim: Umim, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4 w5 w1 w2 w9 w3 w4 w5 w6")
    Checkpoint.load(tiny_checkpoint).recommending("prompt", 2).save(tmp_path / "tail")
    called = ("ppl", tmp_path / "a.txt", "-c", tmp_path / "tail", "--prompt")
    found = document(umim(*called, "--json"))
    assert (found["merge"], found["raw_tail"], found["targets"]) == ("prompt", 2, 6)
    # w1 w2 and w3 w4 of the first half lie before its raw tail, w5 w1
    assert found["token_reduction"] == pytest.approx(1 / 6)
    raw = document(umim(*called, "--raw-tail", "0", "--json"))
    assert raw["token_reduction"] == pytest.approx(3 / 6)
    assert raw["ppl_base"] == found["ppl_base"] and raw["ppl_umim"] != found["ppl_umim"]
    nats = found["targets"] * math.log(found["ppl_base"])
    assert found["bits_per_byte_base"] == pytest.approx(nats / math.log(2) / found["bytes"])
    assert "raw tail 2" in umim(*called).out


def test_bench_measures_and_says_whether_it_pays(umim: Umim, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Return the value of the parameter, or None if it is not set. " * 60)
    quick = "bench --lengths 64 --new-tokens 3 --pairs 1 --warmup 0 -c umim-docs-llama --device cpu"
    called = (*quick.split(), "--text", text)
    options = ("--batch-sizes", "1,2", "--reductions", "0.25,0.5")
    found = document(umim(*called, *options, "--json"))
    assert len(found["rows"]) == 2 * 3 * 3  # batch sizes, kinds of rules, phases
    assert {row["asked_reduction"] for row in found["rows"]} == {0.25, 0.5, None}
    assert {part["prompt_tokens"][0] for part in found["break_even"]} == {64}
    assert found["device"] == "cpu" and "batch size 1" in found["verdict"]
    shown = umim(*called)
    for name in ("1 x 64", "pairs 50 %", "natural", "prefill", "decode", "request", "KV MiB"):
        assert name in shown.out
    summary = shown.out.strip().splitlines()[-1]
    assert summary.startswith(f"{fastest_dtype('cpu')}, merge prompt, raw tail 16. With 64 prompt")
    assert "measuring, settings: 0 of 2" in shown.err


def test_the_default_text_of_bench_is_that_of_held_out_modules(tmp_path: Path) -> None:
    modules = tmp_path / "transformers"
    modules.mkdir()
    for number in range(60):  # 4 % of the paths are held out
        line = f"Text number {number} " * 10
        (modules / f"m{number}.py").write_text(f'"""{line}"""\n')
    assert 0 < held_out_text(tmp_path).count("\n\n") + 1 < 15


def test_demo_asks_both_sides_three_questions(umim: Umim) -> None:
    found = umim("demo", "-c", "umim-docs-gpt2", "--pairs", "1")  # 1,024 positions
    assert found.code == 0, found.err
    assert [int(n) for n in re.findall(r"^(\d)\. ", found.out, re.MULTILINE)] == [1, 2, 3]
    start = found.out.partition("... the first")[0]
    assert re.search(r"\[ \w+ \w+", start)  # a merged span, where there are no colours
    assert len(re.findall(r"^   (?:base|UMIM)  first token after", found.out, re.MULTILINE)) == 6
    verdicts = r"\[(?:the same answer|other words, both right|DIFFERENT: [\w ]+)\]"
    assert len(re.findall(verdicts, found.out)) == 3
    assert re.search(r"its KV cache +[\d.]+ MiB +[\d.]+ MiB", found.out)
    assert re.search(
        r"[\d.]+ times as fast \([\d.]+ to [\d.]+ in 1 pairs; [\d.]+ is the", found.out
    )
    assert "; merge prompt, raw tail 16" in found.out


def test_the_document_of_demo_holds_what_was_measured(umim: Umim) -> None:
    found = document(umim("demo", "-c", "umim-docs-gpt2", "--pairs", "1", "--json"))
    read = found["reading"]
    kept = read["base_kv_bytes"] * (1 - read["token_reduction"])
    assert read["tokens"] > 500 and read["umim_kv_bytes"] == pytest.approx(kept)
    assert read["bound"] > 1 and read["speedup_low"] <= read["speedup"] <= read["speedup_high"]
    for answer in found["answers"]:
        assert (answer["verdict"] == "the same answer") is (answer["base"] == answer["umim"])


def test_answers_of_demo_are_compared() -> None:
    found = [
        verdict(base, ours, "red") for base in ("Red.", "Blue.") for ours in ("It is red.", "")
    ]
    assert verdict("Red.", "Red.", "red") == "the same answer"
    assert found == [
        "other words, both right",
        "DIFFERENT: UMIM is wrong",
        "DIFFERENT: the base model is wrong",
        "DIFFERENT: both are wrong",
    ]


@pytest.mark.full
def test_the_default_checkpoint_answers_rightly(umim: Umim) -> None:
    if fault := model_fault(PACKAGED["smollm2-135m-instruct"]):
        pytest.skip(str(fault))
    found = document(umim("demo", "--pairs", "1", "--json"))
    verdicts = {answer["verdict"] for answer in found["answers"]}
    assert verdicts <= {"the same answer", "other words, both right"}


@pytest.mark.parametrize("root_is_writable", [True, False])
def test_init_gives_the_last_embedding_and_what_generates(
    umim: Umim,
    tiny_checkpoint: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    root_is_writable: bool,
) -> None:
    fingerprint, out = tokenizer_fingerprint(tiny_tokenizer), tmp_path / "start"
    RuleSet.from_spans([(1, 2), (3, 4, 5)], tokenizer_fingerprint=fingerprint).save(
        tmp_path / "rules"
    )
    model = tiny_checkpoint.parent / "backbone"
    if not root_is_writable:  # that costs the name alone
        (tmp_path / "root").write_text("")
    done = umim("init", model, "--rules", tmp_path / "rules", "--out", out)
    assert done.code == 0, done.err
    assert ("name:" in done.out) == root_is_writable
    checkpoint, backbone, span = Checkpoint.load(out), load_backbone(str(model)), [[3, 4, 5]]
    made = checkpoint.module(backbone.embed(torch.tensor(span)), torch.tensor([3]))
    assert torch.equal(made, backbone.embed(torch.tensor(span))[:, -1])
    assert checkpoint.config.training["steps"] == 0
    command = next(shlex.split(line) for line in done.out.splitlines() if "umim generate" in line)
    assert umim(*command[1:3], "-c", out, "--max-new-tokens", 2).code == 0
