"""A second source: which questions are asked, which answers are right, every side of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner import facts
from benchmarks.second_source import (
    Question,
    ask,
    figures,
    gates,
    held_out,
    of_order,
    of_schemas,
    read_questions,
    time_prefill,
)
from docs.make.results import benchmark_page
from support.servers import CHATML
from umim_core import UMIM
from umim_core.errors import CorpusError


def order(number: int) -> dict[str, Any]:
    return {
        "order_id": f"#W{number}",
        "address": {"city": "New York"},
        "items": [{"name": "The sum of the array", "price": 1234.5}],
        "status": "pending",
        "payment_history": [{"payment_method_id": "gift_card_17"}],
    }


def schema(name: str) -> dict[str, Any]:
    properties = {"n": {"type": "number"}, "how": {"enum": ["a", "b"]}, "who": {"type": "string"}}
    parameters = {"properties": properties, "required": ["n", "how", "who"]}
    about = {"name": name, "description": "Return the sum of the array. It"}
    return {"type": "function", "function": {**about, "parameters": parameters}}


def write(folder: Path, orders: int, functions: int) -> list[str]:
    """Write a folder of orders and schemas; return the functions' names."""
    names = [f"find{n}" for n in range(functions)]
    files = {"orders": map(order, range(orders)), "github-mcp": map(schema, names)}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return names


@pytest.mark.parametrize(
    ("fact", "right", "wrong"),
    [
        (0, "It is Pending.", "Delivered."),
        (1, "To new york.", "York."),
        (2, "the Sum of the array", "A lamp."),
        (3, "$1,234.50", "$11,234.5"),
        (4, "By gift card.", "By credit card."),
    ],
)
def test_a_fact_is_told_by_its_key(fact: int, right: str, wrong: str) -> None:
    question = of_order(order(1), fact)
    assert question.accepts(right) and not question.accepts(wrong)


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("46.7", ["$46.7", "46.70.", "It is $46.700"], ["$46.79", "46.75", "46.7.1", "146.7"]),
        ("46.70", ["46.7"], ["46.07"]),
        ("46.0", ["$46.", "46.00", "$46"], ["$46.5", "3.46", "460"]),
        ("46", ["$46.00"], ["$46.01", "460"]),
        ("Boots", ["boots."], ["Bootstrap"]),
    ],
)
def test_a_key_ends_where_it_ends(key: str, right: list[str], wrong: list[str]) -> None:
    question = Question([], None, [], key)
    assert all(map(question.accepts, right)) and not any(map(question.accepts, wrong))


@pytest.mark.parametrize(
    ("orders", "functions", "error"),
    [(40, 60, "20 orders must be held out"), (200, 2, "3 functions must be held out")],
)
def test_too_few_held_out_are_refused(
    tmp_path: Path, orders: int, functions: int, error: str
) -> None:
    write(tmp_path, orders, functions)
    with pytest.raises(CorpusError, match=error):
        list(read_questions(tmp_path))


def test_a_wish_names_no_function_and_the_first_call_counts() -> None:
    question = of_schemas([schema("find"), schema("book")], 1)
    (message,) = question.messages
    assert message["content"] == 'Return the sum of the array.\nn: 7\nhow: "a"\nwho: "demo-who"'
    assert question.accepts('```json\n{"name": "book", "arguments": {"name": "find"')
    assert not question.accepts('{"name": "find"}\n{"name": "book"}')
    assert not question.accepts("book")


def test_unseen_orders_and_functions_are_asked_raw_and_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = write(tmp_path, 200, 60)
    asked = dict(read_questions(tmp_path))
    unseen = [name for name in names if held_out(name)]
    assert [one.key for one in asked["schemas"][: len(unseen)]] == unseen[:20]
    assert len({json.dumps(one.tools) for one in asked["schemas"]}) == 20
    assert all(held_out(one.messages[0]["content"].split()[3][:-1]) for one in asked["results"])
    umim = UMIM.from_pretrained("umim-docs-llama", dtype="float32")
    umim = UMIM(umim.backbone, umim.checkpoint.recommending("prompt", 0, ["tools", "tool"]))
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", CHATML)
    kinds = {
        kind: figures([ask(umim, one) for one in questions[:2]])
        for kind, questions in asked.items()
    }
    assert all(0 < one["saved"] < 1 and one["kept"] == one["base"] for one in kinds.values())
    prefill = time_prefill(umim, tmp_path, 200)
    raw, merged = (side["units"] for side in prefill["sides"].values())
    assert 200 < merged < raw and prefill["bound"] > 1
    found = gates({"kinds": kinds})
    assert found["schemas_saved"][1:] == (0.55, kinds["schemas"]["saved"] >= 0.55)
    assert not found["answers_kept"][2]  # the model knows no answer
    about = {"checkpoint": "small", "backbone": "llama", "dtype": "float32", "new_tokens": 32}
    about |= {"benchmark": "second_source", "rules": 1, "longest": 4, "facts": facts((), None)}
    page = benchmark_page(about | {"kinds": kinds, "prefill": prefill, "gates": found, "equal": 0})
    assert "| schemas " in page and f"{raw:,} tokens raw" in page
