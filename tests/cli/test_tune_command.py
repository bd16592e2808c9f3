"""``umim tune``: from a log to a priced checkpoint and its comparison, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.command_line import Umim, document
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.tuning.tune import BudgetTrial, chosen_budget

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ' ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
OPTIONS = ("--steps", 2, "--spans", 16, "--merge-depth", 1, "--max-tokens", 32, "--device", "cpu")


@pytest.fixture(scope="module")
def backbone(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> Path:
    """A tiny model of one-letter words and 7, with a chat template."""
    folder = tmp_path_factory.mktemp("backbone")
    tiny_model("llama", 0).save_pretrained(folder)
    tokenizer = word_tokenizer(["<eos>", "7", *ascii_lowercase, "A", "B", "C", "D"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


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
    rows += [{"messages": [{"role": "user", "content": "a " * 60}]}] * bool(count)
    lone = [{"messages": [{"role": "nobody", "content": "a"}]}]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows or lone)))
    return folder / "log.jsonl"


def test_a_log_becomes_a_checkpoint_that_is_found_again(
    umim: Umim, backbone: Path, tmp_path: Path
) -> None:
    made = umim("tune", backbone, log(tmp_path, 20), "--out", tmp_path / "out", *OPTIONS, "--json")
    found = document(made)
    assert found["left_out"] == {"request that does not fit the model's context": 1}
    assert " in all: training " in made.err.splitlines()[0]  # its time comes first
    assert found["requests"] == 4 and found["tokens"] == 4 * 16
    assert found["saved"] == pytest.approx(9 / 16)  # ten words are one unit
    assert found["base_nats"] > 0 and found["merged_nats"] > 0 and found["nats_error"] >= 0
    assert 0 <= found["agreement"] <= 1 and found["equal"] <= found["answers"] == 4
    checkpoint = Checkpoint.load(tmp_path / "out")
    assert checkpoint.rules.counts_by_order[10] == 1 and checkpoint.rules.prices is not None
    assert checkpoint.config.roles == ("user", "system", "tools", "tool")
    budgets = [trial[0] for trial in found["trials"]]
    assert found["budget"] == checkpoint.config.budget and found["budget"] in budgets
    assert budgets[0] == checkpoint.rules.prices.max() and budgets == sorted(budgets, reverse=True)
    assert not (tmp_path / "out" / "state").exists()
    again = umim("tune", backbone, log(tmp_path, 20), "--out", tmp_path / "out", *OPTIONS, "--json")
    assert document(again) == found


@pytest.mark.parametrize(
    ("options", "count", "message"),
    [
        ((), 12, "at least 13 conversations; got 12"),
        (("--role", "users"), 20, "roles must be some of"),
        (("--role", "tools"), 20, "something that may merge"),
        (("--merge-depth", "9"), 20, "merge_depth must be below"),
        ((), 0, "logs must hold requests that the model's template writes; got 1 x "),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    umim: Umim,
    backbone: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    count: int,
    message: str,
) -> None:
    out = tmp_path / "out"
    result = umim("tune", backbone, log(tmp_path, count), "--out", out, *OPTIONS, *options)
    assert result.code == 1 and message in result.err, result.err
    assert result.err.splitlines()[-1].startswith("umim: error: ")
    assert not out.exists()


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([], None),
        ([(0.9, 0.6, 1.0, 1.05, 0.98), (0.5, 0.4, 1.0, 1.0, 1.0)], 0.9),
        ([(0.9, 0.6, 1.0, 1.06, 0.99), (0.5, 0.4, 1.0, 1.0, 0.99)], 0.5),
        ([(0.9, 0.6, 1.0, 1.0, 0.97), (0.5, 0.4, 1.0, 1.01, 0.99)], 0.5),
        ([(0.9, 0.6, 1.0, 2.0, 0.5), (0.5, 0.4, 1.0, 1.5, 0.7)], 0.5),  # none: the least
    ],
)
def test_the_budget_saves_most_of_those_that_keep_the_replies(
    trials: list[tuple[float, float, float, float, float]], chosen: float | None
) -> None:
    assert chosen_budget([BudgetTrial(*trial) for trial in trials]) == chosen
