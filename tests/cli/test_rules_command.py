from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Umim, document
from support.merge_modules import give_rows
from support.merged_models import fresh_model
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.rule_options import RuleOptions
from umim_core.rules.inspection import collision_rate
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet

# span -> count; (1, 2) and (2, 1) share a surrogate
COUNTED = {(1, 2): 9, (2, 1): 40, (3, 4, 5): 7, (6, 7, 8, 9): 5}
HELD_OUT = [1, 2, 10, 3, 4, 5, 2, 1]  # twice [1 2] 10 [3 4 5] [2 1], one segment each


def ruleset(counted: dict[tuple[int, ...], int], fingerprint: str | None) -> RuleSet:
    rows = {n: sorted(span for span in counted if len(span) == n) for n in (2, 3, 4)}
    return RuleSet(
        {n: np.array(rows[n], np.int32).reshape(-1, n) for n in rows},
        {n: np.array([counted[span] for span in rows[n]], np.int64) for n in rows},
        RuleOrigin(
            options=RuleOptions(tau=5, segment_length=8, min_documents=2),
            tokenizer_fingerprint=fingerprint,
            corpus_digest="c" * 64,
        ),
    )


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


def test_json_describes_the_rules(umim: Umim, folder: Path) -> None:
    rules = RuleSet.load("rules")
    found = document(umim("rules", "rules", "--json"))
    assert (found["rules"], found["orders"]) == (4, {"2": 2, "3": 1, "4": 1})
    assert (found["tau"], found["segment_length"]) == (5, 8)
    assert (found["overlap"], found["containment"]) == ("greedy", "drop")
    assert found["tokenizer_fingerprint"] == rules.origin.tokenizer_fingerprint
    assert (found["corpus_digest"], found["digest"]) == ("c" * 64, rules.digest)
    assert (found["source"], found["min_documents"]) == ("frequency", 2)
    assert found["infix_free"] is True
    assert found["collision_rate"] == collision_rate(rules) == 0.5
    assert (found["heldout"], found["leaks"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "documents"),
    [
        (["--heldout", "ids.npy"], None),
        (["--heldout", "a.txt", "--heldout", "b.txt", "--tokenizer", "tokenizer"], 2),
        (["--heldout", "[ab].txt", "--tokenizer", "tokenizer"], 2),
        (["--heldout", "rows.jsonl", "--field", "body", "--tokenizer", "tokenizer"], 1),
    ],
)
def test_held_out_text_is_measured(
    umim: Umim, folder: Path, arguments: list[str], documents: int | None
) -> None:
    found = document(umim("rules", "rules", *arguments, "--json"))["heldout"]
    assert isinstance(found, dict)
    assert found["documents"] == documents
    assert found["segment_length"] == 8
    spans = {"2": 4, "3": 2, "4": 0}
    assert found["coverage"] == {
        "tokens": 16,
        "segments": 2,
        "token_reduction": 0.5,
        "spans": spans,
    }
    points = [(p["tau"], p["rules"], p["token_reduction"]) for p in found["curve"]]
    assert points == [(5, 4, 0.5), (7, 3, 0.5), (9, 2, 0.25), (40, 1, 0.125)]


def test_the_table_shows_orders_spans_collisions_and_the_curve(umim: Umim, folder: Path) -> None:
    result = umim("rules", "rules", "--heldout", "ids.npy", "--tokenizer", "tokenizer")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["documents", "at", "least", "2", "per", "rule"] in rows
    assert ["2-grams", "2", "50.0%", "9", "24", "40"] in rows
    assert ["40", "2", "w2·w1"] in rows
    assert "w1·w2 (9)  =  w2·w1 (40)" in result.out
    assert "16 tokens in 2 segments of 8\n" in result.out
    assert "Token reduction 50.00% by 6 merged spans: 2-grams 66.7%, 3-grams 33.3%" in result.out
    assert "those rules of this set whose count is at least tau'" in result.out
    assert ["9", "2", "25.00%", "█" * 20] in rows


def test_a_checkpoint_shows_the_rules_inside_and_its_rows(
    umim: Umim, folder: Path, tiny_llama, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rules = ruleset(COUNTED, tokenizer_fingerprint(tiny_tokenizer))
    model = fresh_model(tiny_llama, rules)
    give_rows(model.require_module(), [(1, 2), (2, 1)])
    Checkpoint.of(model).save("checkpoint")
    assert document(umim("rules", "checkpoint", "--json"))["digest"] == rules.digest
    assert "order; 2 rules have a row" in umim("rules", "checkpoint").out


@pytest.fixture
def leaking(folder: Path, word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast]) -> Path:
    """A folder with a rule that spells out an address."""
    tokenizer = word_tokenizer(["<eos>", "write", "jane@corp.net"])
    tokenizer.save_pretrained(folder / "words")
    ruleset({(1, 1): 9, (1, 2): 6}, tokenizer_fingerprint(tokenizer)).save(folder / "leaking")
    return folder


def test_a_scan_lists_leaks_and_fails(umim: Umim, leaking: Path) -> None:
    result = umim("rules", "leaking", "--tokenizer", "words", "--scan", "--json")
    text = "write jane@corp.net"
    leak = {"span": [1, 2], "text": text, "kind": "e-mail address", "count": 6}
    assert result.code == 1
    assert json.loads(result.out)["leaks"] == [leak]
    shown = umim("rules", "leaking", "--tokenizer", "words", "--scan")
    assert shown.code == 1
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["6", "e-mail", "address", "write·jane@corp.net"] in rows
