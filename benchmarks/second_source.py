"""Answers on tool results and schemas of a second source, behind a checkpoint tuned to it.

    umim tune MODEL logs/ --role system --role tools --role tool --out mine
    python -m benchmarks.second_source --checkpoint mine/checkpoint --data FOLDER --out FILE.json

The folder holds schemas of one server, ``github-mcp.jsonl``, and orders as a tool returns them,
``orders.jsonl``, packed or not. The logs may hold those that ``held_out`` does not keep apart, by
the name of a function or order. Of the others 20 questions each are asked by rule: five facts of an
order in turn, whose answer must hold a key word; and the first sentence of a schema's description,
with values for what it requires, among two other schemas, where the right function must be called.
Besides, one chat with ``--prefill`` tokens of all schemas of the file is read raw and merged in one
run; the ratio of the times stands beside its bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.answering import CHECKPOINT_OPTIONS, kept_right, load
from benchmarks.calls import as_written, file_of
from benchmarks.runner import Benchmark, Gates, Report, tell
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.errors import CorpusError, require
from umim_core.inference.options import GenerateOptions
from umim_core.model.inputs import encode_prompts
from umim_core.text.documents import read_objects
from umim_core.text.token_ids import encode
from umim_core.throughput.roofline import ForwardCost

MERGES: Final[tuple[Merge, Merge]] = ("none", "prompt")
SAVED: Final = {"results": 0.5, "schemas": 0.55}
KEPT: Final = 0.98
_QUESTIONS: Final = 20  # of each kind
_GROUP: Final = 3  # schemas of a question
_NEW: Final = 32  # tokens of an answer
_NAME: Final = re.compile(r'"name": *"([^"]*)"')  # of the first call
_PRICE: Final = re.compile(r"(\d+)(?:\.(\d*?)0*)?")  # its last zeros say nothing
Row = dict[str, Any]
FACTS: Final[tuple[tuple[str, Callable[[Row], object]], ...]] = (
    ("What is the status of this order?", lambda order: order["status"]),
    ("To which city does this order go?", lambda order: order["address"]["city"]),
    ("What is the name of the first item?", lambda order: order["items"][0]["name"]),
    ("What is the price of the first item?", lambda order: order["items"][0]["price"]),
    (
        "Was this order paid by credit card, by gift card or by PayPal?",
        lambda order: order["payment_history"][0]["payment_method_id"].rpartition("_")[0],
    ),
)


@dataclass(frozen=True)
class Question:
    """A question: messages, schemas or none, what may merge of both, and the answer's key."""

    messages: list[Row]
    tools: list[Row] | None
    merging: list[str]
    key: str

    def accepts(self, answer: str) -> bool:
        """Return whether an answer holds the key; where there are schemas, calls that function."""
        if self.tools:
            called = _NAME.search(answer)
            return called is not None and called[1] == self.key
        key = re.escape(_plain(self.key))
        if price := _PRICE.fullmatch(self.key):  # 46.7 is 46.70, and 46 is 46.00
            whole, cents = price.groups("")
            key = rf"(?<!\d\.){whole}" + (rf"\.{cents}0*" if cents else r"(?:\.0+)?")
        return re.search(rf"\b{key}(?!\w)(?!\.\d)", _plain(answer)) is not None


def _plain(text: str) -> str:
    return text.lower().replace("_", " ").replace(",", "")


def held_out(name: str) -> bool:
    """Return whether a function or order is of the fifth that no training may see."""
    return int(hashlib.md5(name.encode()).hexdigest(), 16) % 5 == 0  # noqa: S324


def of_order(order: Row, fact: int) -> Question:
    """Ask one of ``FACTS`` about an order that a tool has returned."""
    asked, answer = FACTS[fact]
    result = json.dumps(order, ensure_ascii=False)
    function = {"name": "get_order_details", "arguments": {"order_id": order["order_id"]}}
    messages = [
        {"role": "user", "content": f"Show me the order {order['order_id']}."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": result},
        {"role": "user", "content": f"{asked} Answer in one short sentence."},
    ]
    return Question(messages, None, [result], str(answer(order)))


def of_schemas(tools: list[Row], place: int) -> Question:
    """Ask for what one of some schemas describes."""
    function = tools[place]["function"]
    parameters = function["parameters"]
    values = {
        name: value_of(name, parameters["properties"][name])
        for name in parameters.get("required", ())
    }
    wish = function["description"].partition("\n")[0].partition(". ")[0].rstrip(".")
    given = "".join(f"\n{name}: {json.dumps(value)}" for name, value in values.items())
    texts = [as_written(tool) for tool in tools]
    message = {"role": "user", "content": f"{wish}.{given}"}
    return Question([message], tools, texts, function["name"])


def value_of(name: str, schema: Row) -> object:
    if "enum" in schema:
        return schema["enum"][0]
    kinds = {"number": 7, "integer": 7, "boolean": True, "array": ["demo"]}
    return kinds.get(str(schema.get("type")), f"demo-{name}")


def read_questions(folder: Path) -> Iterator[tuple[str, list[Question]]]:
    """Yield the questions on orders and on schemas that are held out."""
    orders = [one for one in _rows(folder, "orders") if held_out(one["order_id"])]
    rule = f"{_QUESTIONS} orders must be held out"
    require(len(orders) >= _QUESTIONS, CorpusError, rule, len(orders))
    yield "results", [of_order(orders[n], n % len(FACTS)) for n in range(_QUESTIONS)]
    tools = [one for one in _rows(folder, "github-mcp") if held_out(one["function"]["name"])]
    rule = f"{_GROUP} functions must be held out"
    require(len(tools) >= _GROUP, CorpusError, rule, len(tools))
    asked = []
    for n in range(_QUESTIONS):
        step = 1 + n // len(tools)  # a function that is asked again stands among others
        group = [tools[(n + step * place) % len(tools)] for place in range(_GROUP)]
        place = n % _GROUP
        asked.append(of_schemas(group[-place:] + group[:-place], place))
    yield "schemas", asked


def _rows(folder: Path, name: str) -> Iterator[Row]:
    return (row for _, row in read_objects(file_of(folder, name)))


def run(options: argparse.Namespace, report: Report) -> None:
    umim = load(options, report)
    report |= {"longest": umim.rules.longest, "form": umim.checkpoint.config.form()}
    report |= {"new_tokens": _NEW, "kinds": {}}
    for kind, questions in read_questions(options.data):
        report["kinds"][kind] = figures([ask(umim, one) for one in questions])
        tell(kind, report["kinds"][kind])
    report["prefill"] = time_prefill(umim, options.data, options.prefill)


def ask(umim: UMIM, question: Question) -> Report:
    tokenizer = umim.backbone.require_tokenizer()
    answers, saved = list[str](), 0
    for merge in MERGES:
        options: Row = {"tools": question.tools, "merge": merge, "max_new_tokens": _NEW}
        made = umim.generate(question.messages, do_sample=False, **options)
        answers.append(made.text[0])
        saved = len(made.rows[0].prompt_ids) - made.rows[0].prompt_units
    return {
        "key": question.key,
        "tokens": sum(len(encode(tokenizer, text)) for text in question.merging),
        "saved": saved,
        "accepted": list(map(question.accepts, answers)),
        "same": answers[0] == answers[1],
    }


def time_prefill(umim: UMIM, folder: Path, tokens: int) -> Report:
    """Time one token behind schemas of so many tokens, raw and merged in turn."""
    tokenizer = umim.backbone.require_tokenizer()
    tools, size = list[Row](), 0
    for tool in _rows(folder, "github-mcp"):
        if size < tokens:
            tools.append(tool)
            size += len(encode(tokenizer, as_written(tool)))
    messages, roles = of_schemas(tools, 0).messages, umim.checkpoint.config.roles
    prompt = encode_prompts([messages], umim.backbone, None, tools=tools, roles=roles)
    sides: Report = {}
    for merge in MERGES:
        options = GenerateOptions(merge=merge, raw_tail=0, max_new_tokens=1, do_sample=False)
        cpu, wall = time.process_time(), time.perf_counter()
        (row,) = umim.engine.generate(prompt, options.of_model(umim.backbone)).rows
        seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        sides[merge] = seconds | {"units": row.prompt_units}
    raw, merged = (sides[merge] for merge in MERGES)
    bound = ForwardCost.of(umim.merged_model).prefill_bound(raw["units"], merged["units"])
    times = {f"{clock}_times": raw[clock] / merged[clock] for clock in ("cpu", "wall")}
    return {"sides": sides, "bound": bound, **times}


def figures(rows: Sequence[Report]) -> Report:
    base, merged = zip(*(row["accepted"] for row in rows), strict=True)
    tokens, right = sum(row["tokens"] for row in rows), kept_right(merged, base)
    kept, of_base = right.pop("kept")
    return {
        "questions": len(rows),
        "tokens": tokens,
        "saved": sum(row["saved"] for row in rows) / tokens,
        **right,
        "base": of_base,
        "kept": kept,
        "same": float(np.mean([row["same"] for row in rows])),
        "lost": [row["key"] for row in rows if row["accepted"] == [True, False]],
    }


def gates(report: Report) -> Gates:
    kinds = report["kinds"]
    gates = Gates()
    for kind, least in SAVED.items():
        gates.at_least(f"{kind}_saved", kinds[kind]["saved"], least)
    kept, base = (sum(one[name] for one in kinds.values()) for name in ("kept", "base"))
    gates.at_least("answers_kept", kept / max(1, base), KEPT)
    return gates


BENCHMARK: Final = Benchmark(
    options=CHECKPOINT_OPTIONS | {"data": {"type": Path, "required": True}, "prefill": 8192},
    measure=run,
    gates=gates,
    equal=("answers_kept",),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
