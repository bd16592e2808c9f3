"""Commands from end to end that need no more than a tiny checkpoint: one test or two each."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from support.command_line import Umim, document
from support.merged_models import fresh_model
from support.ngram_oracle import rules_of_counts
from support.processes import need_model
from support.servers import COMPLETIONS, HTTP, Served
from support.tiny_models import word_tokenizer
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.devices import fastest_dtype
from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.baselines.registry import BASELINES
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import default_checkpoint
from umim_core.cli.demo_command import verdict
from umim_core.cli.shared_options import ModelOptions, text_of
from umim_core.config.rule_options import RuleOptions
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.errors import ConfigError
from umim_core.mining.mine import mine_rules
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows
from umim_core.text.sources import source_of

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
    one = umim("compress", "w1 w2", "-c", tiny_checkpoint).out
    assert "2 tokens -> 1 unit, 1 merged span, token reduction 50.0%" in one


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
    found = document(umim(*called, "--max-segments", 10**20, "--json"))
    model = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    assert found["ppl_base"] == pytest.approx(model.perplexity(TEXT, merge="none"), rel=1e-5)
    assert found["ppl_umim"] == pytest.approx(model.perplexity(TEXT), rel=1e-5)
    assert (found["targets"], found["windows"]) == (10, 1)
    assert found["token_reduction"] == pytest.approx(6 / 11)
    head, base, ours, foot = umim(*called).out.splitlines()
    assert head.split() == ["token", "PPL", "bits/byte", "TR"]
    assert (base.split()[0], base.split()[-1], ours.split()[-1]) == ("base", "0.0%", "54.5%")
    assert "10 tokens" in foot and "1 window of at most 512 tokens, 0 of context" in foot


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
    nats = found["targets"] * math.log(found["ppl_base"])
    assert found["bits_per_byte_base"] == pytest.approx(nats / math.log(2) / found["bytes"])
    assert "raw tail 2" in umim(*called).out


def test_bench_measures_and_says_whether_it_pays(umim: Umim, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Return the value of the parameter, or None if it is not set. " * 60)
    quick = "bench --lengths 64 --new-tokens 3 --pairs 1 -c umim-docs-llama --device cpu"
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


def test_demo_asks_both_sides_three_questions(
    umim: Umim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the document alone, where no model of tools lies in the models folder."""
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path))
    monkeypatch.setenv("UMIM_OFFLINE", "1")
    found = umim("demo", "--pairs", "1")
    assert found.code == 0, found.err
    file = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    assert f"SmolLM2-135M cannot call them. They come first with {file}" in found.out
    start = found.out.partition("... the first")[0]
    assert re.search(r"\[ \w+ \w+", start)  # a merged span, where there are no colours
    verdicts = r"(?:the same answer|other words, both right|DIFFERENT: [\w ]+)"
    for count, line in (
        (3, rf"\d\. .*   \[{verdicts}\]"),
        (6, r"   (?:base|UMIM)  \S.*"),
        (1, r"to read the document +[\d.]+ s +[\d.]+ s"),
        (1, r"first tokens after it +[\d.]+ s +[\d.]+ s"),
        (1, r"units +[\d,]+ +[\d,]+"),
        (1, r"its KV cache +[\d.]+ MiB +[\d.]+ MiB"),
        (1, r"[\d.]+ times as fast \([\d.]+ to [\d.]+ in 1 pairs; \d+% fewer units are .*"),
        (1, r"frozen .*; merge prompt, raw tail 16"),
    ):
        assert len(re.findall(f"^{line}$", found.out, re.MULTILINE)) == count, line
    (tmp_path / file).write_text("no model")
    assert file in umim("demo", "--pairs", "1").err  # tools come first
    loaded: list[object] = []

    def refuse(model: ModelOptions, *args: object) -> UMIM:
        loaded.append(model.name)
        raise ConfigError("nothing is loaded", model.name, "Go on.")

    monkeypatch.setattr(ModelOptions, "load", refuse)
    for option in ("--budget", "--target-tr"):  # which need prices
        umim("demo", option, "0.01")
    assert loaded == [default_checkpoint()] * 2


def calling_tools(folder: Path) -> Path:
    """A checkpoint that merges schemas, of the embedded model with a template that calls tools."""
    source = embedded_path("umim-docs-llama", "backbone")
    assert source is not None
    shutil.copytree(source, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}"
        "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
        "{# <tool_call></tool_call> #}"
    )
    backbone = load_backbone(str(folder / "model"))
    spans = {tuple(backbone.encode('{"type": "string"')[k : k + 2]) for k in range(3)}
    made = Checkpoint.of(fresh_model(backbone, sorted(spans)))
    made.recommending("prompt", 0, ("tools",)).save(folder / "merge")
    return folder / "merge"


@pytest.mark.parametrize(("name", "tokens"), [("umim-docs-gpt2", 500), ("tools", 1800)])
def test_the_document_of_demo_holds_what_was_measured(
    umim: Umim, tmp_path: Path, name: str, tokens: int
) -> None:
    """Of a document, cut to 1,024 positions, and of tools."""
    checkpoint = calling_tools(tmp_path) if name == "tools" else name
    (part,) = document(umim("demo", "-c", checkpoint, "--pairs", "1", "--json"))["parts"]
    read = part["reading"]
    kept = read["base_kv_bytes"] * (1 - read["token_reduction"])
    assert read["tokens"] > tokens and read["umim_kv_bytes"] == pytest.approx(kept)
    assert read["bound"] > 1 and read["speedup_low"] <= read["speedup"] <= read["speedup_high"]
    assert min(read["base_first_tokens"], read["umim_first_tokens"]) > 0
    for answer in part["answers"]:
        assert (answer["verdict"] == "the same answer") is (answer["base"] == answer["umim"])


@pytest.mark.parametrize(
    ("base", "ours", "said"),
    [
        ("Red.", "Red.", "the same answer"),
        ("Red bus.", "The bus is red.", "other words, both right"),
        ("Red bus.", "It is red.", "DIFFERENT: UMIM is wrong"),
        ("Blue bus.", "The bus is red.", "DIFFERENT: the base model is wrong"),
        ("Blue bus.", "It is red.", "DIFFERENT: both are wrong"),
    ],
)
def test_answers_of_demo_are_compared(base: str, ours: str, said: str) -> None:
    assert verdict(base, ours, "red bus") == said


@pytest.mark.full
def test_the_default_checkpoint_answers_rightly(umim: Umim) -> None:
    need_model()
    *_, part = document(umim("demo", "--pairs", "1", "--json"))["parts"]
    verdicts = {answer["verdict"] for answer in part["answers"]}
    assert verdicts <= {"the same answer", "other words, both right"}


@pytest.mark.parametrize("root_is_writable", [True, False])
def test_init_gives_the_last_embedding_and_what_generates(
    umim: Umim, workplace: Path, root_is_writable: bool
) -> None:
    if not root_is_writable:  # that costs the name alone
        (workplace / "root").write_text("")
    done = umim("init", "model", "--rules", "rules", "--out", "start")
    assert done.code == 0, done.err
    assert ("name:" in done.out) == root_is_writable
    checkpoint, backbone = Checkpoint.load("start"), load_backbone("model")
    span = backbone.embed(torch.tensor([[3, 4, 5]]))
    assert torch.equal(checkpoint.module(span, torch.tensor([3])), span[:, -1])
    assert checkpoint.config.training["steps"] == 0
    command = next(shlex.split(line) for line in done.out.splitlines() if "umim generate" in line)
    assert umim(*command[1:3], "-c", "start", "--max-new-tokens", 2).code == 0


PLAIN = ("--segment-length", 20, "--tau", 3, "--overlap", "none", "--containment", "keep")


def test_mined_rules_are_those_of_the_library(umim: Umim, workplace: Path) -> None:
    options = (*PLAIN, "--longest", 6, "--protect", "w1$", "--protect", "2")
    called = ("mine", "a.txt", "--tokenizer", "tokenizer", *options, "--out", "out")
    found = document(umim(*called, "--json"))
    asked = RuleOptions(
        tau=3, segment_length=20, overlap="none", containment="keep", longest=6,
        protect=("w1$", "2"),
    )  # fmt: skip
    report = mine_rules(source_of(("a.txt",)), Path("own"), tokenizer="tokenizer", options=asked)
    mined, own = RuleSet.load("out"), RuleSet.load("own")
    assert (mined.digest, mined.origin) == (own.digest, own.origin)
    assert found["tau"] == report.tau == 3 and sum(found["rules"].values()) == len(mined) > 0


def test_skipped_rows_are_told(umim: Umim, workplace: Path) -> None:
    row = json.dumps({"text": Path("a.txt").read_text()})
    Path("rows.jsonl").write_text(f'{row}\n{{"text": 1}}\n[]\n{row}\n')
    options = ("--tokenizer", "tokenizer", *PLAIN, "--out", "out")
    result = umim("mine", "rows.jsonl", *options, "--max-bad", 5)
    assert result.code == 0, result.err
    assert re.search(r"unusable rows skipped: 2, the first: rows.jsonl:2", result.err)
    assert re.search(r"umim train \S+ rows.jsonl --max-bad 5 --rules out --out", result.out)


def test_a_template_of_windows_is_read_without_its_mark(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xef\xbb\xbf{{ messages }}")
    assert text_of(tmp_path / "chat.jinja", "--chat-template") == "{{ messages }}"


@pytest.mark.full
def test_a_server_that_is_ended_lets_its_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMIM_TEST_TOKEN", "secret")
    server = Served("umim-docs-llama", "--host", "127.0.0.1", "--api-key-env", "UMIM_TEST_TOKEN")
    body = {"prompt": "Return a private thing", "max_tokens": 40, "temperature": 0, "stream": True}
    key = {"authorization": "Bearer secret"}
    try:
        assert HTTP.get(server.url + "/v1/models").status_code == 401
        text, lines = "", 0
        with HTTP.stream(
            "POST", server.url + COMPLETIONS, json=body, headers=key, timeout=120
        ) as answer:
            for line in answer.iter_lines():
                if not lines:
                    server.process.send_signal(signal.SIGTERM)
                lines += 1
                if line.startswith("data: {"):
                    text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
            assert line == "" or line == "data: [DONE]"
        assert len(text) > 40
        assert server.end() == -signal.SIGTERM  # uvicorn raises it again when it is done
    finally:
        server.process.kill()
    said = "".join(server.lines)
    assert '"path": "/v1/completions", "status": 200' in said
    assert "private" not in said and "secret" not in said and "Traceback" not in said


# span -> count
COUNTED = {(1, 2): 9, (2, 1): 40, (3, 4, 5): 7, (6, 7, 8, 9): 5}
HELD_OUT = [1, 2, 10, 3, 4, 5, 2, 1]  # twice [1 2] 10 [3 4 5] [2 1], one segment each


def ruleset(counted: dict[tuple[int, ...], int], fingerprint: str | None) -> RuleSet:
    options = RuleOptions(tau=5, segment_length=8, min_documents=2)
    origin = RuleOrigin(options=options, tokenizer_fingerprint=fingerprint, corpus_digest="c" * 64)
    return rules_of_counts(counted, origin)


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A folder with rules, tokenizers and held-out files, and the current one."""
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    ruleset(COUNTED, tokenizer_fingerprint(tiny_tokenizer)).save(tmp_path / "rules")
    np.save(tmp_path / "ids.npy", np.array(HELD_OUT * 2, np.uint16))
    words = " ".join(f"w{i}" for i in HELD_OUT)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(words)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": f"{words} {words}"}) + "\n")
    return tmp_path


def test_json_describes_the_rules_of_a_directory_or_a_checkpoint(
    umim: Umim, folder: Path, tiny_llama
) -> None:
    rules = RuleSet.load("rules")
    Checkpoint.of(fresh_model(tiny_llama, rules)).save("checkpoint")
    found = document(umim("rules", "checkpoint", "--json"))
    assert found | {"directory": "rules"} == document(umim("rules", "rules", "--json"))
    assert (found["rules"], found["orders"]) == (4, {"2": 2, "3": 1, "4": 1})
    assert rules.origin.record().items() <= found.items()
    assert (found["tau"], found["digest"]) == (5, rules.digest)
    assert (found["infix_free"], found["heldout"], found["leaks"]) == (True, None, None)
    assert umim("rules", "checkpoint", "--heldout", "ids.npy").code == 0  # its model is not here


@pytest.mark.parametrize(
    ("options", "documents"),
    [
        ("--heldout ids.npy", None),
        ("--heldout a.txt --heldout b.txt --tokenizer tokenizer", 2),
        ("--heldout [ab].txt --tokenizer tokenizer", 2),
        ("--heldout rows.jsonl --field body --tokenizer tokenizer", 1),
    ],
)
def test_held_out_text_is_measured(
    umim: Umim, folder: Path, options: str, documents: int | None
) -> None:
    found = document(umim("rules", "rules", *options.split(), "--json"))["heldout"]
    assert (found["documents"], found["segment_length"]) == (documents, 8)
    sizes = {"tokens": 16, "segments": 2, "token_reduction": 0.5}
    assert found["coverage"] == {**sizes, "spans": {"2": 4, "3": 2, "4": 0}}


def test_the_table_shows_orders_spans_and_the_reduction(umim: Umim, folder: Path) -> None:
    result = umim("rules", "rules", "--heldout", "ids.npy", "--tokenizer", "tokenizer")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["documents", "at", "least", "2", "per", "rule"] in rows
    assert ["2-grams", "2", "50.0%", "9", "24", "40"] in rows
    assert ["40", "2", "w2·w1"] in rows
    assert "16 tokens in 2 segments of 8\n" in result.out
    assert "Token reduction 50.00% by 6 merged spans: 2-grams 66.7%, 3-grams 33.3%" in result.out


def test_the_rules_of_a_checkpoint_are_texts_or_ids_where_its_model_is_not_here(
    umim: Umim, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(rule["text"] for rule in document(umim("rules", tiny_checkpoint, "--json"))["top"])
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path))
    result = umim("rules", "umim-qwen-coder-0.5b-tools")
    assert result.code == 0 and "shown as token ids: their tokenizer is not here: " in result.out
    assert umim("rules", "umim-qwen-coder-0.5b-tools", "--scan").code == 1


def test_a_scan_lists_leaks_and_fails(umim: Umim, folder: Path) -> None:
    text, scan = "write jane@corp.net", ("rules", "leaking", "--tokenizer", "words", "--scan")
    tokenizer = word_tokenizer(["<eos>", *text.split()])
    tokenizer.save_pretrained("words")
    ruleset({(1, 1): 9, (1, 2): 6}, tokenizer_fingerprint(tokenizer)).save("leaking")
    found, shown = umim(*scan, "--json"), umim(*scan)
    leak = {"span": [1, 2], "text": text, "kind": "e-mail address", "count": 6}
    assert (found.code, json.loads(found.out)["leaks"], shown.code) == (1, [leak], 1)
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["6", "e-mail", "address", "write·jane@corp.net"] in rows
