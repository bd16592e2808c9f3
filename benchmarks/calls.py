"""Function calls from merged tool schemas: questions of the Berkeley leaderboard, base and UMIM.

    python -m benchmarks.calls --checkpoint DIR --bfcl FOLDER --out FILE.json

The folder holds the published files (``BFCL_v4_NAME.json`` or ``NAME.jsonl``, packed or not) and
``possible_answer``. Only questions whose functions all have names of the fifth that ``held_out``
keeps apart are asked: a checkpoint may have been trained on the others. Sides: the base model,
merged schemas by all spans and by the cheapest spans that save less (``--targets``), and the base
model without the descriptions of parameters. A call counts if its function is right and its
arguments are accepted values, as the leaderboard compares them. Besides: nats a token of the right
call, and the share of its tokens that base and merged model agree on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.answers.__main__ import SUBJECT, load
from benchmarks.common import Benchmark, Report
from umim_core import UMIM
from umim_core.errors import CorpusError, require
from umim_core.evaluation.paired_differences import mean_difference_error
from umim_core.model.umim import UMIM as Model
from umim_core.serving.tool_calls import json_values
from umim_core.text.sources import read_objects
from umim_core.traffic.prompt_rows import PromptRow, prompt_rows
from umim_core.traffic.requests import Left, Request
from umim_core.tuning.tune import replies

SETS: Final = ("simple_python", "multiple", "live_multiple", "parallel", "parallel_multiple")
_NEW: Final = 160  # tokens of a reply
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_IGNORED: Final = str.maketrans("", "", " ,./-_*^")  # in the leaderboard's comparison of strings
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question: messages, schemas, and per call what is accepted of each argument."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    accepted: list[dict[str, dict[str, list[Any]]]]

    def request(self) -> Request:
        """Return it as a logged request with the right calls as its reply."""
        calls = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": {key: value[0] for key, value in given.items() if value[0] != ""},
                },
            }
            for one in self.accepted
            for name, given in one.items()
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        return Request("", str(id(self)), (), (), self.messages, self.tools, answer)


def held_out(function: str) -> bool:
    """Return whether a function's questions are never trained on: those of a fifth of the names."""
    return int(hashlib.md5(function.split(".")[0].encode()).hexdigest(), 16) % 5 == 0  # noqa: S324


def read_questions(folder: Path, most: int) -> Iterator[Question]:
    """Yield up to ``most`` questions of each set whose functions are all held out."""
    for name in SETS:
        rows = {row["id"]: row for _, row in read_objects(_file(folder, name))}
        answers = _file(folder / "possible_answer", name)
        found = 0
        for _, answer in read_objects(answers):
            row = rows[answer["id"]]
            unseen = all(held_out(function["name"]) for function in row["function"])
            if unseen and found < most:
                found += 1
                tools = [{"type": "function", "function": one} for one in row["function"]]
                yield Question(row["question"][0], tools, answer["ground_truth"])


def _file(folder: Path, name: str) -> Path:
    found = [
        path
        for path in sorted(folder.glob("*"))
        if path.name.removeprefix("BFCL_v4_").split(".")[0] == name
    ]
    require(bool(found), CorpusError, f"{folder} must hold the questions of {name}", "none")
    return found[0]


def calls_of(text: str) -> list[dict[str, Any]]:
    """Return the calls that a reply holds, in marks or alone; none where one is no JSON."""
    try:
        found = [json.loads(one) for one in _CALL.findall(text)] or json_values(text)
    except (ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict) and "name" in one]


def is_right(calls: Sequence[Row], accepted: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Return whether calls are those that are accepted, in any order."""
    left = list(accepted)
    for call in calls:
        match = next((one for one in left if _fits(call, one)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _fits(call: Row, accepted: Mapping[str, Mapping[str, Any]]) -> bool:
    arguments = call.get("arguments")
    if call["name"] not in accepted or not isinstance(arguments, dict):
        return False
    values = accepted[call["name"]]
    return all(key in values for key in arguments) and all(
        any(_same(arguments[key], one) for one in allowed) if key in arguments else "" in allowed
        for key, allowed in values.items()
    )


def _same(given: object, accepted: object) -> bool:
    if isinstance(given, str) and isinstance(accepted, str):
        return given.translate(_IGNORED).lower() == accepted.translate(_IGNORED).lower()
    if isinstance(given, list) and isinstance(accepted, list):
        pairs = zip(given, accepted, strict=False)
        return len(given) == len(accepted) and all(_same(*pair) for pair in pairs)
    if isinstance(given, dict) and isinstance(accepted, dict):
        return all(
            any(_same(given[key], one) for one in allowed) if key in given else "" in allowed
            for key, allowed in accepted.items()
        )
    return given == accepted and isinstance(given, bool) == isinstance(accepted, bool)


def without_descriptions(value: Any) -> Any:
    """Return schemas without the descriptions of parameters."""
    if isinstance(value, dict):
        return {
            key: without_descriptions(one)
            for key, one in value.items()
            if key != "description" or not isinstance(one, str) or "parameters" in value
        }
    return [without_descriptions(one) for one in value] if isinstance(value, list) else value


def run(options: argparse.Namespace, report: Report) -> None:
    """Ask every question from every side."""
    umim = load(options, report)
    questions = list(read_questions(options.bfcl, options.most))
    sides: dict[str, tuple[Model, bool, bool]] = {"base": (umim, False, False)}
    sides["umim"] = umim, True, False
    for target in options.targets:
        cheaper = UMIM.from_pretrained(options.checkpoint, backbone=umim.backbone, target_tr=target)
        sides[f"umim, target {target:g}"] = cheaper, True, False
    sides["no descriptions"] = umim, False, True
    report["questions"] = len(questions)
    report["sides"] = {}
    base: dict[str, Any] = {}
    for name, (model, merged, bare) in sides.items():
        found = ask(model, questions, merged=merged, bare=bare)
        base = base or found
        report["sides"][name] = figures(found, base)
        print(name, report["sides"][name], file=sys.stderr, flush=True)


def ask(
    umim: Model, questions: Sequence[Question], *, merged: bool, bare: bool
) -> dict[str, list[Any]]:
    """Return per question whether the greedy call is right, and the right call's scores."""
    rows: list[PromptRow] = []
    right, saved = list[bool](), list[float]()
    roles = umim.checkpoint.config.roles
    tokenizer = umim.backbone.require_tokenizer()
    for question in questions:
        tools = without_descriptions(question.tools) if bare else question.tools
        asked = Question(question.messages, tools, question.accepted)
        full = next(prompt_rows([question.request()], tokenizer, roles, Left()))
        row = next(prompt_rows([asked.request()], tokenizer, roles, Left()))
        rows.append(row)
        made = umim.generate(
            question.messages,
            tools=tools,
            merge="prompt" if merged else "none",
            raw_tail=0,
            max_new_tokens=_NEW,
            do_sample=False,
        )
        right.append(is_right(calls_of(made.text[0]), question.accepted))
        saved.append(1 - made.rows[0].prompt_units / len(full.prompt))
    model = umim.merged_model if merged else umim.merged_model.base()
    nats, greedy = replies(model, rows)
    return {"right": right, "saved": saved, "nats": nats, "greedy": greedy}


def figures(found: Mapping[str, list[Any]], base: Mapping[str, list[Any]]) -> Report:
    """Return the figures of a side, against those of the base model."""
    own, theirs = (np.array(side["right"], dtype=float) for side in (found, base))
    solved = theirs == 1
    same = [np.mean(a == b) for a, b in zip(found["greedy"], base["greedy"], strict=True)]
    return {
        "saved": float(np.mean(found["saved"])),
        "right": int(own.sum()),
        "kept": [int(own[solved].sum()), int(solved.sum())],
        "points": 100 * float(own.mean() - theirs.mean()),
        "points_error": _percent(mean_difference_error(own.tolist(), theirs.tolist())),
        "nats": float(np.mean(found["nats"])),
        "nats_error": mean_difference_error(found["nats"], base["nats"]),
        "agreement": float(np.mean(same)),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


BENCHMARK: Final = Benchmark(
    name="calls",
    doc=str(__doc__),
    options=SUBJECT
    | {"bfcl": {"type": Path, "required": True}, "targets": {"nargs": "*", "type": float}},
    measure=run,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
