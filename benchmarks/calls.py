"""Function calls from merged tool schemas: questions of the Berkeley leaderboard, base and UMIM.

    python -m benchmarks.calls --checkpoint DIR --bfcl FOLDER --out FILE.json

The folder holds the published files (``BFCL_v4_NAME.json`` or ``NAME.jsonl``, packed or not) and
``possible_answer``. Only questions whose functions all have names of the fifth that ``held_out``
keeps apart are asked: a checkpoint may have been trained on the others. Sides: the base model;
schemas merged by the checkpoint's budget, by ``--budgets`` and by its spans of at most four tokens;
and the base model with schemas that have no descriptions of parameters, that are written without
white space, or that are cut behind as many tokens as merging leaves. A call counts if its function
is right and its arguments are accepted values, as the leaderboard compares them. Besides: the share
of the schemas' tokens that is saved, and, behind the prompt, nats a token of the right call as the
base model writes calls, and the share of its tokens that both would say.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers import SUBJECT, load, points
from benchmarks.runner import Benchmark, Report
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.errors import CorpusError, require
from umim_core.evaluation.paired_differences import mean_difference_error
from umim_core.inference.options import GenerateOptions
from umim_core.inference.prompts import PromptIds
from umim_core.model.umim import UMIM as Model
from umim_core.serving.tool_calls import json_values
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.roles import Role
from umim_core.text.rows import read_objects
from umim_core.text.token_ids import encode
from umim_core.traffic.prompt_rows import PromptRow
from umim_core.tuning.tune import replies

SETS: Final = ("simple_python", "multiple", "live_multiple", "parallel", "parallel_multiple")
SHORT: Final = 4  # tokens of the spans of one side
_NEW: Final = 160  # tokens of a reply
_BATCH: Final = 8  # prompts that are answered at once
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_IGNORED: Final = str.maketrans("", "", " ,./-_*^")  # in the leaderboard's comparison of strings
Row = Mapping[str, Any]
Edit = Callable[[dict[str, Any]], str]  # of a schema, to the text that stands for it


@dataclass(frozen=True)
class Question:
    """A question: messages, schemas, and per call what is accepted of each argument."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    accepted: list[dict[str, dict[str, list[Any]]]]

    def answer(self) -> str:
        """Return the right calls, as a model writes them that was not taught the marks."""
        calls = [
            {
                "name": name,
                "arguments": {key: value[0] for key, value in given.items() if value[0] != ""},
            }
            for one in self.accepted
            for name, given in one.items()
        ]
        texts = [json.dumps(call, indent=2, ensure_ascii=False) for call in calls]
        return "\n".join(f"```json\n{text}\n```" for text in texts)


class Answers(NamedTuple):
    """What a side answers, by question.

    Attributes:
        right: Whether all its calls are right, and no others.
        saved: Share of the prompt's tokens that it saves; ``tools_saved`` of the schemas' tokens.
        nats: Mean nats a token of the right call; ``greedy`` which of its tokens would be said [n].
    """

    right: list[bool]
    saved: list[float]
    tools_saved: list[float]
    nats: list[float]
    greedy: list[NDArray[np.bool_]]


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


def as_written(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def bare(schema: dict[str, Any]) -> str:
    return as_written(without_descriptions(schema))


def minified(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def cut(umim: Model, share: float) -> Edit:
    """Return what keeps so much of the tokens of a schema, from its beginning."""
    tokenizer = umim.backbone.require_tokenizer()

    def first(schema: dict[str, Any]) -> str:
        ids = encode(tokenizer, as_written(schema))
        return str(tokenizer.decode(ids[: round(share * len(ids))]))

    return first


def run(options: argparse.Namespace, report: Report) -> None:
    """Ask every question from every side."""
    umim = load(options, report)
    questions = list(read_questions(options.bfcl, options.most))
    report |= {"questions": len(questions), "new_tokens": _NEW, "longest": umim.rules.longest}
    report["form"] = umim.checkpoint.config.form()
    report["sides"] = []

    def ask_side(name: str, model: Model, merge: Merge, edit: Edit = as_written) -> Answers:
        found = ask(model, questions, merge, edit)
        report["sides"].append({"side": name} | figures(found, found if name == "base" else base))
        print(report["sides"][-1], file=sys.stderr, flush=True)
        return found

    def by(budget: float) -> Model:
        return UMIM.from_pretrained(options.checkpoint, backbone=umim.backbone, budget=budget)

    base = ask_side("base", umim, "none")
    merged = ask_side("umim", umim, "prompt")
    for budget in options.budgets or ():
        ask_side(f"umim, budget {budget:g}", by(budget), "prompt")
    short = umim.rules.take(umim.rules.sizes <= SHORT)
    fewer = umim.checkpoint.with_contents(umim.checkpoint.module, short)
    ask_side(f"umim, spans of at most {SHORT}", Model(umim.backbone, fewer), "prompt")
    ask_side("no descriptions of parameters", umim, "none", bare)
    ask_side("no white space", umim, "none", minified)
    ask_side("cut", umim, "none", cut(umim, 1 - float(np.mean(merged.tools_saved))))


def ask(umim: Model, questions: Sequence[Question], merge: Merge, edit: Edit) -> Answers:
    """Answer questions greedily, with schemas that are merged or edited, and score right calls."""
    roles: tuple[Role, ...] = tuple(umim.checkpoint.config.roles)
    tokenizer = umim.backbone.require_tokenizer()
    options = GenerateOptions(merge=merge, raw_tail=0, max_new_tokens=_NEW, do_sample=False)
    rows, found = list[PromptRow](), Answers([], [], [], [], [])
    whole, written = list[int](), list[int]()
    for question in questions:
        chat = write_chat(question.messages, tokenizer, question.tools, roles)
        ids, parts = encode_parts(tokenizer, chat.text, chat.places)
        whole.append(len(ids))
        written.append(sum(len(encode(tokenizer, as_written(tool))) for tool in question.tools))
        if edit is not as_written:
            text = chat.text
            for tool in question.tools:
                text = text.replace(as_written(tool), edit(tool))
            ids, parts = np.array(encode(tokenizer, text), dtype=np.int64), ()
        reply = np.array(encode(tokenizer, question.answer()), dtype=np.int64)
        rows.append(PromptRow("", "", ids, parts, reply))
    for first in range(0, len(rows), _BATCH):
        prompts = [PromptIds(row.prompt, row.parts) for row in rows[first : first + _BATCH]]
        made = umim.engine.generate(prompts, options.of_model(umim.backbone))
        for n, answer in enumerate(made.rows, first):
            said = tokenizer.decode(answer.ids, skip_special_tokens=True)
            found.right.append(is_right(calls_of(said), questions[n].accepted))
            found.saved.append((whole[n] - answer.prompt_units) / whole[n])
            found.tools_saved.append((whole[n] - answer.prompt_units) / written[n])
    scores = replies(umim.merged_model if merge == "prompt" else umim.merged_model.base(), rows)
    return found._replace(nats=scores.nats, greedy=scores.greedy)


def figures(found: Answers, base: Answers) -> Report:
    """Return the figures of a side, against those of the base model."""
    change = points(found.right, base.right)
    same = [np.mean(a == b) for a, b in zip(found.greedy, base.greedy, strict=True)]
    return {
        "saved": float(np.mean(found.saved)),
        "tools_saved": float(np.mean(found.tools_saved)),
        "right": sum(found.right),
        "kept": [sum(map(all, zip(found.right, base.right, strict=True))), sum(base.right)],
        "points": change["mean"],
        "points_error": change["std"],
        "nats": float(np.mean(found.nats)),
        "nats_error": mean_difference_error(found.nats, base.nats),
        "agreement": float(np.mean(same)),
    }


BENCHMARK: Final = Benchmark(
    name="calls",
    doc=str(__doc__),
    options=SUBJECT
    | {"bfcl": {"type": Path, "required": True}, "budgets": {"nargs": "*", "type": float}},
    measure=run,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
