"""Logged requests in ids: as the template writes them, with what may merge and the reply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.text.roles import Role
from umim_core.traffic import prompt_rows as prompt_rows_module
from umim_core.traffic.prompt_rows import PromptRow, prompt_rows
from umim_core.traffic.requests import Left, read_requests

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}"
END = "</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLED = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + MESSAGES + CALLS + END
OF_PARTS = "{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
PLAIN = MESSAGES + END
TOOL = {"name": "find", "parameters": {"properties": {"x": {"type": "string"}}}}
ASK: dict[str, Any] = {"role": "user", "content": "Find the array."}
CALL = {"function": {"name": "find", "arguments": '{"x": "array"}'}}
SHOWN_CALL = '{"name": "find", "arguments": {"x": "array"}}'
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("umim-docs-llama")


def rows_of(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *logged: object,
    roles: tuple[Role, ...],
    **context: int,
) -> tuple[list[PromptRow], Left]:
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, logged)))
    left = Left()
    requests = read_requests((str(folder),), None, left)
    return list(prompt_rows(requests, tokenizer, roles, left, **context)), left


def test_a_text_file_is_one_text_of_the_kind_of_its_ending(tmp_path: Path) -> None:
    for name, text in (("a.txt", "\ufeffThe sum."), ("b.md", ""), ("c.py", "x = 1")):
        (tmp_path / name).write_text(text)
    left = Left()
    found = [*read_requests((f"{tmp_path}/*.txt", f"{tmp_path}/*.md"), None, left)]
    found += read_requests((f"{tmp_path}/*.py",), "text", left)
    pieces = [(piece.role, piece.content, piece.text) for one in found for piece in one.prompt]
    assert pieces == [("text", "prose", "The sum."), ("text", "code", "x = 1")]
    assert left.reasons == {"file without text": 1}


REPLIES = {
    "a call": (CALLED, f"[{SHOWN_CALL}]"),
    "a text": ({"role": "assistant", "content": "The array. "}, "The array. "),
    "a text that ends as the question does": (
        {"role": "assistant", "content": "Find the array."},
        "Find the array.",
    ),
}


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("content", ["{{ m.content or '' }}", OF_PARTS])
def test_a_request_is_read_as_the_template_writes_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, inside: bool, content: str
) -> None:
    """The reply stands in the response, or is the last message."""
    tokenizer.chat_template = TOOLED.replace("{{ m.content or '' }}", content)
    answer, said = REPLIES[name]
    body: dict[str, Any] = {"messages": [ASK], "tools": [TOOL]}
    if inside:
        body["messages"] = [ASK, answer]
    else:
        body["response"] = {"choices": [{"message": answer}]}
    ([row], left) = rows_of(tmp_path, tokenizer, body, roles=("user", "tools"))
    prompt = f"{json.dumps(TOOL)}\n<user>{ASK['content']}</s>\n<assistant>"
    assert tokenizer.decode(row.prompt) == prompt and tokenizer.decode(row.reply) == said
    parts = [tokenizer.decode(row.prompt[first:end]) for first, end in row.parts]
    assert len(parts) == 4 and parts[-1] in ASK["content"]  # names of function and parameter stay
    assert all(part in json.dumps(TOOL) and "find" not in part for part in parts[:-1])
    assert not left.reasons


def test_schemas_and_calls_are_texts_where_a_template_knows_no_tools(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{% if 'dev' in messages[0].role %}{{ 1 / 0 }}{% endif %}" + PLAIN
    system = {"role": "developer", "content": "Be brief."}
    turns = [system, ASK, CALLED, {"role": "tool", "content": "found"}]
    logged = {"messages": turns, "tools": [TOOL], "response": {"choices": [{"message": CALLED}]}}
    renamed = {"messages": [system, ASK]}
    ([row, other], left) = rows_of(tmp_path, tokenizer, logged, renamed, roles=("system",))
    assert tokenizer.decode(other.prompt).startswith("<system>Be brief.</s>\n<user>")
    assert tokenizer.decode(row.prompt) == (
        f"<system>Be brief.\n{json.dumps(TOOL)}</s>\n<user>Find the array.</s>\n"
        f"<assistant>{SHOWN_CALL}</s>\n<tool>found</s>\n<assistant>"
    )
    assert tokenizer.decode(row.reply) == SHOWN_CALL
    (note,) = left.lines("not counted: ")
    assert note.startswith("1 x tools written into the system prompt: the model's template knows")


DEEP: Any = json.loads("[" * 900 + "]" * 900)
WIDE = "\u6f22\u202e" * 50
ODD: list[Any] = [None, True, 5, 1e308, 10**40, "", "SECRET", "\ud800", " ", [], {}, [None], [5]]
ODD += [["SECRET"], [[]], [{}], {"a": 5}, [{"text": "SECRET"}], [{"image_url": "SECRET"}], DEEP]
ODD += ["[" * 900 + "]" * 900, WIDE]
FIELDS: tuple[tuple[str | int, ...], ...] = (
    *(("messages", *rest) for rest in ((), (0,), (0, "role"), (0, "content"), (1, "content"))),
    *(("messages", 1, *rest) for rest in (("function_call",), ("tool_calls",), ("tool_calls", 0))),
    *(
        ("messages", 1, "tool_calls", 0, "function", *rest)
        for rest in ((), ("name",), ("arguments",))
    ),
    *(("tools", *rest) for rest in ((), (0,), (0, "name"), (0, "parameters"))),
    *(
        ("response", *rest)
        for rest in ((), ("choices",), ("choices", 0), ("choices", 0, "message"))
    ),
    *(("response", "choices", 0, "message", name) for name in ("role", "content", "tool_calls")),
    *((name,) for name in ("request", "body", "functions", "text", "choices", "output")),
    *((name,) for name in ("system", "instructions")),
)


@pytest.mark.parametrize("template", [TOOLED, PLAIN])
def test_odd_fields_are_read_or_counted_and_never_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    tokenizer.chat_template = template
    rows: list[Any] = []
    for path in FIELDS:
        for value in ODD:
            turns = [ASK, {**CALLED}, {"role": "tool", "content": "found"}]
            answer = {"choices": [{"message": CALLED}]}
            row: Any = {"messages": turns, "tools": [TOOL], "response": answer}
            row = at = json.loads(json.dumps(row))
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = value
            rows.append(row)
    for value in ODD:
        call = {"type": "function_call", "call_id": "1", "name": value, "arguments": value}
        result = {"type": "function_call_output", "call_id": value, "output": value}
        odd = {"role": "assistant", "content": "", "tool_calls": value}
        rows += [
            {"input": [odd, call, value, call, result], "system": value, "output": [odd, call]}
        ]
        rows += [{"model": "m", "input": value, "response": {"output": value}}]
    (found, left) = rows_of(tmp_path, tokenizer, *rows, roles=("user", "system", "tools", "tool"))
    assert all(len(row.prompt) for row in found)
    places = {row.place for row in found}
    # What gives no row is counted, maybe of several rows by one reason.
    assert len(places) == len(found) and len(rows) - len(found) <= left.reasons.total()
    assert "SECRET" not in " ".join(left.lines())


def test_parts_of_a_content_are_one_text_and_tell_conversations_apart(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = PLAIN
    parts = [[{"type": "text", "text": "Find "}, {"type": "text", "text": last}] for last in "ab"]
    asked = [{"messages": [{"role": "user", "content": one}, CALLED]} for one in parts]
    asked.append({"messages": [ASK], "body": {"id": 1}, "tools": TOOL})  # a lone schema
    (rows, _) = rows_of(tmp_path, tokenizer, *asked, roles=("user",))
    assert tokenizer.decode(rows[0].prompt) == "<user>Find a</s>\n<assistant>"
    assert tokenizer.decode(rows[0].reply) == SHOWN_CALL
    assert len({row.conversation for row in rows}) == 3
    assert json.dumps(TOOL) in tokenizer.decode(rows[2].prompt)


@pytest.mark.parametrize("kind", ["messages", "response", "text"])
def test_what_does_not_fit_the_context_is_counted_and_not_tokenized_whole(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer.chat_template = PLAIN
    short: dict[str, Any] = {"messages": [ASK, {"role": "assistant", "content": "It."}]}
    long = {**ASK, "role": "assistant", "content": "Find the array. " * 20_000}
    logged = {"text": long["content"], **(short if kind != "text" else {})}
    if kind == "messages":
        logged["messages"] = [long, ASK]
    elif kind == "response":
        logged["response"] = {"choices": [{"message": long}]}

    def guarded(encoded: Callable[..., Any]) -> Callable[..., Any]:
        def of_short(tokenizer: object, text: str, *more: object) -> object:
            assert len(text) < 1000
            return encoded(tokenizer, text, *more)

        return of_short

    for name in ("encode", "encode_parts"):
        monkeypatch.setattr(prompt_rows_module, name, guarded(getattr(prompt_rows_module, name)))
    ([row], left) = rows_of(tmp_path, tokenizer, short, logged, roles=("user",), most=64)
    size = len(row.prompt) + len(row.reply)
    assert left.reasons == {"request that does not fit the model's context": 1}
    for most, answer, found in ((size, 0, 1), (size - 1, 0, 0), (64, 64, 0)):
        rows, _ = rows_of(tmp_path, tokenizer, short, roles=(), most=most, answer=answer)
        assert len(rows) == found


def test_texts_merge_whole_and_what_no_template_writes_is_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    logged = ({"text": "The sum."}, {"messages": [ASK, ASK]})
    ([row], left) = rows_of(tmp_path, tokenizer, *logged, roles=("user",))
    assert row.parts == ((0, len(row.prompt)),) and not len(row.reply)
    assert left.reasons == {"chat that the model's template cannot write": 1}
