"""``umim tune``: from a log to a checkpoint and its comparison, once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

from support.command_line import Umim, document
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.tuning.tune import ReplyScores

OPTIONS = (
    *("--steps", 2, "--spans", 16, "--merge-depth", 1, "--adapter-rank", 2, "--max-tokens", 32),
    *("--device", "cpu"),
)


def log(folder: Path, count: int) -> Path:
    """Write requests: 10 words in all of them, one of their own, a reply of 2."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "a b c d e f g h i j"},
                {"role": "user", "content": f"{ascii_lowercase[n % 20]} 7 {'ABCD'[n % 4]}"},
            ],
            "response": {"choices": [{"message": {"role": "assistant", "content": "k l"}}]},
        }
        for n in range(count)
    ]
    too_long, unread = ("user", "a " * 60), ("nobody", "a")
    role, content = too_long if count else unread
    rows.append({"messages": [{"role": role, "content": content}]})
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "log.jsonl"


def test_a_log_becomes_a_checkpoint_that_is_found_again_and_tuned_further(
    umim: Umim, letters: Path, tmp_path: Path
) -> None:
    first, second, log_file = tmp_path / "first", tmp_path / "second", log(tmp_path, 20)
    made = umim("tune", letters, log_file, "--out", first, *OPTIONS, "--json")
    found = document(made)
    assert found["left_out"] == {"request that does not fit the model's context": 1}
    count, omitted, time = (line.partition("  ")[2] for line in made.err.splitlines()[:3])
    assert count == "20 requests to tune on"
    assert omitted.startswith("not counted: 1 x request that does not fit the model's context (fir")
    assert " in all: training " in time
    assert found["requests"] == 4 and found["tokens"] == 4 * 16
    assert found["saved"] == pytest.approx(9 / 16)  # ten words are one unit
    base_nats, merged_nats, error, agreement = found["replies"]
    assert base_nats > 0 and merged_nats > 0 and error >= 0
    assert 0 <= agreement <= 1 and found["equal"] <= found["answers"] == 4
    checkpoint = Checkpoint.load(first)
    assert checkpoint.rules.counts_by_order[10] == 1
    assert (checkpoint.config.merge_depth, checkpoint.config.adapter_rank) == (1, 2)
    assert checkpoint.config.roles == ("user", "system", "tools", "tool")
    shortest = [trial["shortest"] for trial in found["trials"]]
    assert shortest == sorted(set(shortest)) and found["shortest"] == shortest[-1]
    assert checkpoint.rules.sizes.min() >= shortest[-1] >= 3
    assert len(checkpoint.rules) == found["trials"][-1]["spans"]
    assert not (first / "state").exists()
    again = umim("tune", letters, log_file, "--out", first, *OPTIONS, "--json")
    assert document(again) == found
    still = (
        *("--start", first, "--steps", 1, "--learning-rate", 1e-9),
        *OPTIONS[2:4],
        *OPTIONS[6:],  # its own rank, too
    )
    done = umim("tune", letters, log_file, "--out", second, *still)
    assert done.code == 0 and f"\n  umim serve {second}\n" in done.out, done.err
    assert "umim export" not in done.out  # other engines merge input embeddings alone
    two = Checkpoint.load(second)
    assert two.config.form() == checkpoint.config.form() and two.config.adapter_rank == 2
    assert two.module.digest() == checkpoint.module.digest()
    third = tmp_path / "third"
    refused = umim("tune", letters, log_file, "--out", third, *still, "--longest", 12)
    assert "must have the 16 tokens of its start; got 12" in refused.err and not third.exists()


def test_what_merges_input_embeddings_can_be_exported(
    umim: Umim, letters: Path, tmp_path: Path
) -> None:
    out, exported = tmp_path / "out", tmp_path / "out-exported"
    depth = ("--merge-depth", 0)
    made = umim("tune", letters, log(tmp_path, 20), "--out", out, *OPTIONS, *depth)
    assert f"\n  umim export {out} --out {exported}\n" in made.out, made.err
    done = umim("export", out, "--out", exported, "--json")
    assert document(done)["spans"] == len(Checkpoint.load(out).rules)


@pytest.mark.parametrize(
    ("options", "count", "own", "message"),
    [
        ((), 12, {}, "at least 13 conversations; got 12"),
        (("--role", "users"), 20, {}, "roles must be some of"),
        (("--role", "tools"), 20, {}, "something that may merge"),
        (("--merge-depth", "9"), 20, {}, "--merge-depth must be below"),
        ((), 0, {}, "logs must hold requests that the model's template writes; got 1 x "),
        ((), 20, {"num_beams": 4}, "got {'num_beams': 4}"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    umim: Umim,
    letters: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    count: int,
    own: dict[str, int],
    message: str,
) -> None:
    out, model = tmp_path / "out", shutil.copytree(letters, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(own))
    result = umim("tune", model, log(tmp_path, count), "--out", out, *OPTIONS, *options)
    *told, line = result.err.splitlines()
    assert result.code == 1 and line.startswith("umim: error: ") and message in line
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in told)
    assert not out.exists()


@pytest.mark.parametrize(
    ("nats", "agreed", "keeps"),
    [(1.05, 49, True), (1.0501, 50, False), (0.5, 50, True), (1.0, 48, False)],
)
def test_replies_are_kept_by_their_nats_and_the_tokens_that_both_would_say(
    nats: float, agreed: int, keeps: bool
) -> None:
    base = ReplyScores([1.0, 1.0], [np.ones(40, np.bool_), np.ones(10, np.bool_)])
    said = [np.arange(40) < agreed, np.arange(10) < agreed - 40]
    change = ReplyScores([nats, nats], said).against(base)
    assert change.keeps is keeps and change.agreement == pytest.approx(agreed / 50)
    assert (change.base_nats, change.merged_nats) == pytest.approx((1.0, nats))


def test_replies_count_by_their_tokens() -> None:
    base = ReplyScores([1.0, 2.0], [np.ones(30, np.bool_), np.ones(10, np.bool_)])
    change = ReplyScores([2.0, 2.0], [np.zeros(30, np.bool_), np.ones(10, np.bool_)]).against(base)
    assert change[:2] == pytest.approx((50 / 40, 2.0)) and change.agreement == 0.25
    assert change.nats_error == pytest.approx(0.75)
