"""Function calls from merged tool schemas: questions of the Berkeley leaderboard, base and UMIM.

    python -m benchmarks.calls --checkpoint DIR --bfcl FOLDER --out FILE.json

The folder holds the published files (``BFCL_v4_NAME.json`` or ``NAME.jsonl``, packed or not) and
``possible_answer``. Asked are questions whose functions all are functions of the set ``multiple``;
the checkpoint must recommend to merge ``tools`` and must not have been trained on any of these.
``--after N`` leaves out the first N of each set, by whose lost calls something was chosen. Sides:
the base model; schemas merged by the checkpoint's spans, and by those of at most four tokens; and
the base model with schemas that have no descriptions of parameters, that are written without white
space, or that are cut behind as many tokens as merging leaves. All sides but the first two are
asked ``--few`` of the questions, evenly spread; 0 leaves them out. ``--answers`` names a folder in
which every side's answers stay, so that a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.answering import CHECKPOINT_OPTIONS, identity, kept, load, points
from benchmarks.runner import Benchmark, Report, tell
from umim_core.config.form import Merge
from umim_core.errors import CorpusError, GenerationError, require
from umim_core.inference.options import GenerateOptions
from umim_core.model.umim import UMIM as Model
from umim_core.rules.matcher import PromptIds
from umim_core.serving.tool_calls import json_values
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.documents import read_objects
from umim_core.text.roles import Role
from umim_core.text.token_ids import decode, encode, spread_rows
from umim_core.traffic.prompt_rows import PromptRow
from umim_core.tuning.tune import ReplyScores, reply_scores

SETS: Final = ("simple_python", "multiple")
UNSEEN: Final = "multiple"  # the set whose functions no training may see
SHORT: Final = 4  # tokens of the spans of one side
NEW: Final = 160  # tokens of a reply
_TOOLS: Final = "function"  # the field of a question
_BATCH: Final = 8  # prompts that are answered at once
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_IGNORED: Final = str.maketrans("'", '"', " ,./-_*^")  # in the leaderboard's comparison of strings
Row = Mapping[str, Any]
Edit = Callable[[dict[str, Any]], str]  # of a schema, to the text that stands for it


@dataclass(frozen=True)
class Question:
    """Messages, schemas, and per call what is accepted of each argument."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    accepted: list[dict[str, dict[str, list[Any]]]]

    def answer(self) -> str:
        """Return the right calls, as a model writes them that was not taught the marks."""
        calls = [
            {
                "name": name,
                "arguments": {key: _written(one) for key, one in _first(given).items()},
            }
            for one in self.accepted
            for name, given in one.items()
        ]
        texts = [json.dumps(call, indent=2, ensure_ascii=False) for call in calls]
        return "\n".join(f"```json\n{text}\n```" for text in texts)


class Asked(NamedTuple):
    """A question as a side reads it, and the tokens of its prompt and schemas, unedited."""

    question: Question
    row: PromptRow  # the right calls are its reply
    tokens: int
    schema_tokens: int


class Answer(NamedTuple):
    """What a side answers to a question."""

    right: bool  # all its calls, and no others are there
    saved: float  # share of the prompt's tokens
    tools_saved: float  # of the schemas' tokens
    nats: float  # mean of the tokens of the right calls
    greedy: list[bool]  # which of these tokens the model says


def _first(accepted: Row) -> Row:
    """Return the first of the accepted values of every field that is written."""
    return {key: one[0] for key, one in accepted.items() if one and one[0] != ""}


def _written(value: Any) -> Any:
    """Return an argument as it is written: an object names accepted values, too, one in it none."""
    if isinstance(value, dict):
        return _first(value)
    return [_written(one) for one in value] if isinstance(value, list) else value


def read_questions(folder: Path, most: int, after: int = 0) -> Iterator[Question]:
    """Yield up to ``most`` questions of each set, whose functions all are unseen."""
    unseen = {
        tool["name"] for _, row in read_objects(file_of(folder, UNSEEN)) for tool in row[_TOOLS]
    }
    for name in SETS:
        rows = {row["id"]: row for _, row in read_objects(file_of(folder, name))}
        answers = [
            (rows[answer["id"]], answer["ground_truth"])
            for _, answer in read_objects(file_of(folder / "possible_answer", name))
        ]
        asked = [pair for pair in answers if unseen >= {tool["name"] for tool in pair[0][_TOOLS]}]
        for row, accepted in asked[after : after + most]:
            tools = [{"type": "function", "function": tool} for tool in row[_TOOLS]]
            yield Question(row["question"][0], tools, accepted)


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a set of questions, packed or not."""
    found = [*folder.glob(f"BFCL_v4_{name}.*"), *folder.glob(f"{name}.*")]
    require(bool(found), CorpusError, f"{folder} must hold the questions of {name}", "none")
    return found[0]


def calls_of(text: str) -> list[dict[str, Any]]:
    """Return the calls that a reply holds, in marks or alone; none where one is no JSON."""
    try:
        found = [json.loads(one) for one in _CALL.findall(text)] or json_values(text)
    except (ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]


def is_right(calls: Sequence[Row], accepted: Sequence[Mapping[str, Mapping[str, Any]]]) -> bool:
    """Return whether calls are those that are accepted, in any order."""
    left = list(accepted)
    for call in calls:
        name, arguments = call["name"], call.get("arguments")
        if not isinstance(arguments, dict):
            return False
        known = [one for one in left if name in one]
        match = next((one for one in known if _accepted(arguments, one[name], _same)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _accepted(
    given: Row, accepted: Mapping[str, Any], same: Callable[[object, object], bool]
) -> bool:
    """Return whether all fields have accepted values; "" among them: the field may be missing."""
    return given.keys() <= accepted.keys() and all(
        any(same(given[key], one) for one in allowed) if key in given else "" in allowed
        for key, allowed in accepted.items()
    )


def _same(given: object, accepted: object) -> bool:
    """Return whether an argument is an accepted one; objects in an object are compared whole."""
    if isinstance(given, list) and isinstance(accepted, list):
        pairs = zip(given, accepted, strict=False)
        return len(given) == len(accepted) and all(_same(*pair) for pair in pairs)
    if isinstance(given, dict) and isinstance(accepted, dict):
        return _accepted(given, accepted, _equal)
    return _equal(given, accepted)


def _equal(given: object, accepted: object) -> bool:
    if isinstance(given, str) and isinstance(accepted, str):
        return given.translate(_IGNORED).lower() == accepted.translate(_IGNORED).lower()
    return given == accepted and isinstance(given, bool) == isinstance(accepted, bool)


def without_descriptions(value: Any) -> Any:
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
    umim = load(options, report, "tools")
    questions = list(read_questions(options.bfcl, options.most, options.after))
    require(bool(questions), CorpusError, "--after and --most must leave questions", "none")
    report |= {"questions": len(questions), "sets": SETS, "new_tokens": NEW}
    report |= {"after": options.after, "longest": umim.rules.longest}
    report |= {"form": umim.checkpoint.config.form(), "sides": []}
    few = spread_rows(len(questions), options.few)

    def ask_all(
        model: Model, merge: Merge, which: Sequence[int], edit: Edit = as_written
    ) -> list[Answer]:
        asked = prompts(model, [questions[n] for n in which], edit)
        batches = (asked[n : n + _BATCH] for n in range(0, len(asked), _BATCH))
        return [one for batch in batches for one in ask(model, batch, merge, options.answers)]

    def add(name: str, found: list[Answer], same: list[Answer]) -> None:
        report["sides"].append({"side": name, "questions": len(found)} | figures(found, same))
        tell(report["sides"][-1])

    whole = range(len(questions))
    base, merged = ask_all(umim, "none", whole), ask_all(umim, "prompt", whole)
    add("base", base, base)
    add("umim", merged, base)
    if not few:
        return
    base_few = [base[n] for n in few]
    add("umim, these questions", [merged[n] for n in few], base_few)
    short = umim.rules.take(umim.rules.sizes <= SHORT)
    fewer = umim.checkpoint.with_contents(umim.checkpoint.module, short)
    shorter = Model(umim.backbone, fewer)
    add(f"umim, spans of at most {SHORT}", ask_all(shorter, "prompt", few), base_few)
    left = 1 - float(np.mean([one.tools_saved for one in merged]))
    edits = {"no descriptions of parameters": bare, "no white space": minified}
    for name, edit in (edits | {"cut": cut(umim, left)}).items():
        add(name, ask_all(umim, "none", few, edit), base_few)


def prompts(umim: Model, questions: Sequence[Question], edit: Edit) -> list[Asked]:
    """Write questions by the model's template, with right calls; schemas are edited in its text."""
    roles: tuple[Role, ...] = tuple(umim.checkpoint.config.roles)
    tokenizer = umim.backbone.require_tokenizer()
    asked = list[Asked]()
    for question in questions:
        chat = write_chat(question.messages, tokenizer, question.tools, roles)
        ids, parts = encode_parts(tokenizer, chat.text, chat.places)
        schemas = [as_written(tool) for tool in question.tools]
        sizes = len(ids), sum(len(encode(tokenizer, schema)) for schema in schemas)
        if edit is not as_written:
            text = chat.text
            for schema, tool in zip(schemas, question.tools, strict=True):
                rule = "schemas are edited where the model's template writes them as JSON"
                require(schema in text, GenerationError, rule, "another form")
                text = text.replace(schema, edit(tool))
            ids, parts = np.array(encode(tokenizer, text), dtype=np.int64), ()
        reply = np.array(encode(tokenizer, question.answer()), dtype=np.int64)
        asked.append(Asked(question, PromptRow("", "", ids, parts, reply), *sizes))
    return asked


def ask(umim: Model, batch: Sequence[Asked], merge: Merge, answers: Path | None) -> list[Answer]:
    """Answer a batch greedily and score right calls; what lies in ``answers`` is read there."""
    rows = [one.row for one in batch]
    read = [[row.prompt.tolist(), row.parts, row.reply.tolist()] for row in rows]
    scored = [[question.accepted, *sizes] for question, _, *sizes in batch]
    decides = [answers and identity(umim, merge), NEW, read, scored]

    def answer() -> list[Answer]:
        tokenizer = umim.backbone.require_tokenizer()
        options = GenerateOptions(merge=merge, raw_tail=0, max_new_tokens=NEW, do_sample=False)
        inputs = [PromptIds(row.prompt, row.parts) for row in rows]
        made = umim.engine.generate(inputs, options.of_model(umim.backbone)).rows
        model = umim.merged_model if merge == "prompt" else umim.merged_model.base()
        found = []
        for one, written, nats, greedy in zip(batch, made, *reply_scores(model, rows), strict=True):
            said = decode(tokenizer, written.ids)
            right = is_right(calls_of(said), one.question.accepted)
            fewer = one.tokens - written.prompt_units
            saved = fewer / one.tokens, fewer / one.schema_tokens
            found.append(Answer(right, *saved, nats, greedy.tolist()))
        return found

    return [Answer(*one) for one in kept(answers, decides, answer)]


def figures(found: Sequence[Answer], base: Sequence[Answer]) -> Report:
    own, theirs = (
        ReplyScores([one.nats for one in side], [np.array(one.greedy) for one in side])
        for side in (found, base)
    )
    replies = own.against(theirs)
    right, base_right = [one.right for one in found], [one.right for one in base]
    change = points(right, base_right)
    return {
        "saved": float(np.mean([one.saved for one in found])),
        "tools_saved": float(np.mean([one.tools_saved for one in found])),
        "right": sum(right),
        "kept": [sum(map(all, zip(right, base_right, strict=True))), sum(base_right)],
        "points": change["mean"],
        "points_error": change["std"],
        "nats": replies.merged_nats,
        "base_nats": replies.base_nats,
        "nats_error": replies.nats_error,
        "agreement": replies.agreement,
    }


BENCHMARK: Final = Benchmark(
    options=CHECKPOINT_OPTIONS
    | {
        "bfcl": {"type": Path, "required": True},
        "most": 1000,
        "few": 1000,
        "after": 0,
        "answers": Path,
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
