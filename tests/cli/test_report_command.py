"""``umim report``: every text is counted under who wrote it, nothing of it is shown."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from support.command_line import Umim, document
from support.tiny_models import word_tokenizer
from umim_core.traffic.requests import ROW_AS_RESULT, Left, Piece, read_requests

SECRET = "w30 w31 sk-secret"
FUNCTION = {"name": "w1", "arguments": "{}"}
CALL = {"id": "1", "type": "function", "function": FUNCTION}


def message(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_a_request_in_every_form_gives_the_same_pieces(tmp_path: Path) -> None:
    body = {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "é"}}],
        "messages": [
            message("developer", "w1"),
            message("user", [{"type": "text", "text": "w2"}, {"type": "text", "text": "w3"}]),
            message("assistant", None, tool_calls=[CALL]),
            message("tool", '{"w4": 5}', tool_call_id="1"),
        ],
    }
    answer = {"choices": [{"message": message("assistant", "w6")}]}
    said: dict[str, Any] = message("assistant", [{"type": "output_text", "text": "w6"}])
    newer = {
        **{"model": "m", "tools": body["tools"], "instructions": "w1"},
        "input": [
            message("user", [{"type": "input_text", "text": text} for text in ("w2", "w3")]),
            {"type": "function_call", "call_id": "1", **FUNCTION},
            {"type": "function_call_output", "call_id": "1", "output": '{"w4": 5}'},
        ],
    }
    turns = [
        {"from": "function_call", "value": json.dumps(FUNCTION)},
        {"from": "observation", "value": '{"w4": 5}'},
    ]
    rows = [
        {**body, "response": answer},
        {"request": body, "response": {"status_code": 200, "body": answer}},
        {"custom_id": "1", "body": body, "response": answer},
        {"request": json.dumps(body), "response": json.dumps(answer)},
        {**body, "tools": [], "functions": body["tools"], **answer},
        {**body, "system": "w1", "messages": body["messages"][1:], "response": answer},
        {**body, "response": {"choices": [{"message": message("assistant", None, refusal="w6")}]}},
        {**newer, "response": {"output": [{"type": "message", **said}]}},
        {**newer, "output": [said]},
        {**body, "output": None, "choices": ["w9"], "response": answer},
        {**body, "messages": [*body["messages"], message("assistant", "w6")], "output": "w9"},
        {"body": body, **answer},
        {"request": body, "shots": [{"messages": [message("user", "w9")]}], "response": answer},
        {"request_body": json.dumps(body), "response_body": json.dumps(answer)},
        {"id": 1, "data": {"input": {**body, "model": None}, "output": answer}},
        {**body, "instructions": "w1", "response": answer},
        {name: json.dumps(body[name]) for name in ("messages", "tools")} | {"response": answer},
        {"conversations": [{"from": "system", "value": "w1"}, *body["messages"][1:]]}
        | {"tools": body["tools"], "response": answer},
        {"system": "w1", "conversations": [body["messages"][1], *turns]}
        | {"tools": [json.dumps(body["tools"][0])], "response": answer},
        {"messages": body["messages"], "model_parameters": {"tools": body["tools"]}, **answer},
        {"messages": "{}", "proxy_server_request": json.dumps(body), "response": answer},
        {"input": body, "output": message("assistant", "w6")},
        {"input": json.dumps(body["messages"]), "metadata": {"tools": body["tools"]}}
        | {"output": json.dumps(message("assistant", "w6"))},
        {**body, "response": {"message": said}},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed = json.dumps(rows[0], indent=2)
    (tmp_path / "one.json").write_text(printed)
    (tmp_path / "two.json").write_text(f'{{"id": 1, {printed[1:]}')  # one field on the first line
    (tmp_path / "export.json").write_text(json.dumps({"count": 2, "data": [rows[0]] * 2}))
    (tmp_path / "array.JSON.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    left = Left()
    found = list(read_requests((str(tmp_path),), None, left))
    prompt = (
        Piece("tools", "json", '{"type": "function", "function": {"name": "é"}}'),
        Piece("system", "prose", "w1"),
        Piece("user", "prose", "w2"),
        Piece("user", "prose", "w3"),
        Piece("assistant", "json", '{"name": "w1", "arguments": "{}"}'),
        Piece("tool", "json", '{"w4": 5}'),
    )
    reply = (Piece("assistant", "prose", "w6"),)
    assert [(one.prompt, one.reply) for one in found] == [(prompt, reply)] * (2 * len(rows) + 4)
    assert len({one.conversation for one in found}) == 1
    assert not left.reasons
    (tmp_path / "export.json").write_text(json.dumps({"data": [rows[0], "one that failed"]}))
    assert len(list(read_requests((f"{tmp_path}/export.json",), None, left))) == 1
    assert left.reasons == {"row that is no JSON object": 1}


LONE = {
    "text": ({"text": "w1", "other": 2}, "text", "w1"),
    "schema": ({"name": "w1", "parameters": {}}, "tools", '{"name": "w1", "parameters": {}}'),
    "result": ({"order": [1]}, "tool", '{"order": [1]}'),
    "items": ({"output": [{"type": "w1"}]}, "tool", '{"output": [{"type": "w1"}]}'),
    "tools that ran": (
        {"messages": [message("user", "w1")], "trace": {"tools": [{"name": "w2", "ms": 3}]}},
        *("user", "w1"),
    ),
    "no turns": ({"conversations": 3}, "tool", '{"conversations": 3}'),
    "choices": ({"text": "w1", "choices": ["a", "b"]}, "text", "w1"),
    "names of a schema": (
        {"name": "w1", "parameters": {"properties": {"model": {}, "messages": {}}}},
        "tools",
        '{"name": "w1", "parameters": {"properties": {"model": {}, "messages": {}}}}',
    ),
    "elsewhere": ({"sent": {"model": "m", "prompt": "w1"}}, "text", "w1"),
    "in a string": ({"request": '{"model": "m", "prompt": "w1"}'}, "text", "w1"),
    "chat": ({"model": "m", "input": "w1", "output": [message("assistant", "w2")]}, "user", "w1"),
    "turns": (
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}
        | {"system": "", "tools": ""},
        *("user", "w1"),
    ),
    "embedding": (
        {"model": "m", "input": "w1", "output": [0.5]},
        *("tool", '{"model": "m", "input": "w1", "output": [0.5]}'),
    ),
}


@pytest.mark.parametrize("name", LONE)
def test_a_row_without_messages_is_one_text(name: str, tmp_path: Path) -> None:
    row, role, text = LONE[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    left = Left()
    (request,) = read_requests((str(tmp_path),), None, left)
    assert [(piece.role, piece.text) for piece in request.prompt] == [(role, text)]
    assert left.reasons == ({ROW_AS_RESULT: 1} if role == "tool" else {})


UNUSABLE: dict[str, tuple[Any, str]] = {
    "no object": ([1], "row that is no JSON object"),
    "messages": ({"messages": SECRET}, "row whose messages are no list"),
    "tool": ({"messages": [], "tools": [SECRET]}, "tool that is no JSON object"),
    "call": ({"messages": [message("user", "", tool_calls=[5])]}, "call without a function's name"),
    "response": ({"messages": [], "response": SECRET}, "response without a message"),
    "its text": ({"messages": [], "output": SECRET}, "response without a message"),
    "alone": (
        {"response": {"body": {"choices": [{"message": message("assistant", SECRET)}]}}},
        "response without its request",
    ),
    "role": ({"messages": [message(SECRET, SECRET)]}, "message of an unknown role"),
    "message": ({"messages": [SECRET]}, "message of an unknown role"),
    "image": ({"messages": [message("user", [{"image_url": SECRET}])]}, "request without text"),
    "null": ({"messages": [message("user", [None])]}, "part that is no text"),
    "ids": ({"model": "m", "prompt": [5, 6]}, "part that is no text"),
    "item": ({"input": [message("user", ""), {"type": "x"}]}, "item that is no message"),
    "text": ({"prompt": "", "response": {"choices": [{"text": SECRET}]}}, "response without"),
    "number": ({"messages": [message("user", 5)]}, "part that is no text"),
    "surrogate": ({"messages": [message("user", "\ud800")]}, "text with lone surrogates"),
    "empty": ({"messages": []}, "request without text"),
}


def conversations(count: int) -> list[dict[str, Any]]:
    """Chats: a user's 2 words, and a result of 12 tokens, 8 of them equal in all chats.

    A reply of the same words comes first; it stays raw, and hides none of them.
    """
    two = [f"{ascii_lowercase[8 + n % 9]} {ascii_lowercase[17 + n % 7]}" for n in range(count)]
    results = [(said, f"a b c d e f g h 7 {said} 7") for said in two]
    return [
        {"messages": [message("assistant", x), message("user", said), message("tool", x)]}
        for said, x in results
    ]


def test_figures_add_up_and_unusable_rows_are_told_without_their_text(
    umim: Umim, letters: Path, tmp_path: Path
) -> None:
    rows = [*conversations(40), *(row for row, _ in UNUSABLE.values())]
    rows[0]["messages"].append(message("system", " "))  # a text of no token
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nno JSON " + SECRET)
    options = ("report", tmp_path, "--tokenizer", letters)
    page = tmp_path / "report.html"
    result = document(umim(*options, "--json", "--html", page))
    assert result["requests"] == 40 and result["held_out"] == 8
    prose = {"assistant": 480, "user": 80, "tool": 480}
    assert result["tokens"] == {role: {"prose": count} for role, count in prose.items()}
    assert result["digits"] == 160 / 1040 and result["cached"] == 0  # no block of 16 is whole
    saved = {(s["longest"], s["rows"]): s["roles"]["tool"] for s in result["savings"]}
    assert saved[4, 1024] >= 6 / 12  # two spans of 4
    assert saved[8, 1024] >= saved[4, 1024] and result["pays"]
    for _, reason in UNUSABLE.values():
        assert any(told.startswith(reason) for told in result["left_out"])
    told = umim(*options)
    assert told.code == 0 and "It pays: " in told.out
    for text in (told.out, told.err, page.read_text()):
        assert "sk-secret" not in text and "w31" not in text
    assert "It pays: " in page.read_text()


# A text, whose it is, its tokens, and the share that spans of 16 save.
RAW_PARTS = (
    # {"parameters": {}, "name": " | a b c d ", | "description": " a b c d "}    4, 5 and 7 tokens
    (
        '{"parameters": {}, "name": " a b c d ", "description": " a b c d "}',
        *("tools", 16, (3 + 6) / 16),
    ),
    # {"a": " | w x | ", "b b b": " | y z | "}    2, 2, 5, 2 and 1 tokens
    ('{"a": " w x ", "b b b": " y z "}', "tool", 12, (1 + 4) / 12),
)


@pytest.mark.parametrize(("text", "role", "tokens", "saved"), RAW_PARTS)
def test_what_calls_spell_and_answers_repeat_is_no_saving_as_it_never_merges(
    umim: Umim, tmp_path: Path, text: str, role: str, tokens: int, saved: float
) -> None:
    word_tokenizer(["<eos>", *dict.fromkeys(text.split())]).save_pretrained(tmp_path / "words")
    (tmp_path / "a.jsonl").write_text("\n".join([text] * 20))
    options = ("--tokenizer", tmp_path / "words", "--json")
    result = document(umim("report", tmp_path / "a.jsonl", *options))
    told = umim("report", tmp_path / "a.jsonl", *options[:-1]).out.splitlines()[1]
    assert told.startswith(f"20 x {ROW_AS_RESULT} (first: ") is (role == "tool")
    assert result["tokens"] == {role: {"json": 20 * tokens}}
    assert {s["roles"][role] for s in result["savings"] if s["longest"] == 16} == {saved}


def test_a_warm_prefix_cache_serves_whole_blocks_of_what_came_before(
    umim: Umim, letters: Path, tmp_path: Path
) -> None:
    first = " ".join(ascii_lowercase[n % 9] for n in range(40))
    rows = [{"messages": [message("system", first), message("user", w)]} for w in ("a", "b")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = document(umim("report", tmp_path, "--tokenizer", letters, "--json"))
    assert result["cached"] == 32 / 82  # of the second prompt two blocks of 16


def test_a_long_text_alone_is_many_texts(umim: Umim, letters: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(ascii_lowercase[n % 9] for n in range(2 * 4096 + 1)))
    result = document(umim("report", tmp_path, "--tokenizer", letters, "--json"))
    assert (result["requests"], result["conversations"], result["held_out"]) == (3, 3, 1)
    assert result["tokens"] == {"text": {"prose": 2 * 4096 + 1}}
    assert {s["roles"]["text"] for s in result["savings"] if s["longest"] == 4} == {0.75}


ERRORS = {
    "no folder": ((), "nothing-there", "must exist"),
    "shape": (("--shape", "./nothing"), ".", "got ./nothing. Name one of them, or a model's dir"),
    "close shape": (("--shape", "llama-3-8b"), ".", "Did you mean 'llama-3.1-8b'?"),
    "memory": (("--gpu-gib", "4"), ".", "must fit a GPU"),
    "array": ((), "broken.json", "must be one whole JSON value"),
    "nothing": ((), "empty.jsonl", "at least one request; got 1 x file without rows"),
    "no rows": ((), "text.jsonl", "JSON object (first: text.jsonl:1). Log requests as"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_reported_is_one_line(
    umim: Umim, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("\n".join(map(json.dumps, conversations(4))))
    Path("empty.jsonl").write_text("\n")
    options, place, message = ERRORS[name]
    if place == "broken.json":
        Path(place).write_text(f'[{{"text": "{SECRET}"')
    if place == "text.jsonl":
        Path(place).write_text("secret\n")
    result = umim("report", place, "--tokenizer", letters, *options)
    assert (result.code, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith("umim: error: ") and message in line and "secret" not in line
