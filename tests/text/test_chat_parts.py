"""Chats as templates write them: what may merge, what is refused, and how much it may cost."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError, GenerationError
from umim_core.text import template_process
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.roles import Role, check_roles
from umim_core.text.template_process import Chat

_LOOP = (
    "{%% for m in messages %%}<{{ m['role'] }}>%s\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<assistant>{%% endif %%}"
)
_PARTS = "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}"
_THINK = "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}"
# Templates that write what users say as it is, at most without white space at its edges.
FAITHFUL = {
    "plain": _LOOP % "{{ m['content'] }}",
    "trim": _LOOP % "{{ m['content'] | trim }}",
    "lstrip": _LOOP % "{{ m['content'].lstrip() }}",
    "rstrip": _LOOP % "{{ m['content'].rstrip('\\n') }}",
    "think": _LOOP % _THINK,
    "think, then strip": _LOOP % _THINK.replace("[-1]", "[-1].lstrip('\\n')"),
    "no replies": _LOOP % "{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}",
    "upper replies": _LOOP
    % "{{ m['content'] | upper if m['role'] == 'assistant' else m['content'] }}",
    "json replies": _LOOP
    % "{{ m['content'] | tojson if m['role'] == 'assistant' else m['content'] }}",
    "json": _LOOP % "{{ m['content'] | tojson }}",
    "ascii json": _LOOP % "{{ m['content'] | tojson(ensure_ascii=true) }}",
    "system first": "{{ messages[0]['content'] }}|" + _LOOP % "{{ m['content'] }}",
    "looks at the first letter": _LOOP
    % "{% if m['content'].startswith('<') %}tool {% endif %}{{ m['content'] }}",
    "generation": _LOOP % "{% generation %}{{ m['content'] }}{% endgeneration %}",
    "parts": _LOOP % _PARTS,
    "both": _LOOP
    % ("{% if m['content'] is string %}{{ m['content'] }}{% else %}" + _PARTS + "{% endif %}"),
}
# Templates that change what users say: it stays raw.
REWRITING = {
    "upper": _LOOP % "{{ m['content'] | upper }}",
    "replace": _LOOP % "{{ m['content'] | replace('a', 'b') }}",
    "cut": _LOOP % "{{ m['content'][4:] }}",
    "escape": _LOOP % "{{ m['content'] | replace('e', '&#101;') }}",
}
# Templates that drop what is said: an error, whatever form contents have.
DROPPING = {
    "users": _LOOP % "{% if m['role'] != 'user' %}{{ m['content'] }}{% endif %}",
    "systems": _LOOP % "{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}",
    "all but the last": "{{ messages[-1]['content'] }}",
    "another field": _LOOP % "{{ m['text'] }}",
}
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}"
    "{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "width": "{{ '%0999999999d' % 1 }}",
    "centre": "{{ 'a' | center(10**10) }}",
    "overflow": "{{ 'a'.center(10**30) }}",
    "digits": "{{ (10**5000) | string }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "{{ messages[0]['content'] }}{{ 'a' * 10**7 }}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "syntax": "{% for",
    "refusal": "{{ raise_exception('no system prompt') }}",
}
# Templates that write tools in front, and calls behind what assistants say.
_CALLS = (
    "{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
)
TOOLED = {
    "each": "{% for t in tools %}{{ t | tojson }}\n{% endfor %}" + _LOOP % _CALLS,
    "function": "{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}" + _LOOP % _CALLS,
    "indented": "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}" + _LOOP % _CALLS,
    "compact": "{% for t in tools %}{{ t | tojson(separators=(',', ':')) }}\n{% endfor %}"
    + _LOOP % _CALLS,
    "list": "[TOOLS]{{ tools | tojson }}" + _LOOP % _CALLS,
    "behind": _LOOP % _CALLS + "{% for t in tools %}{{ t | tojson }}{% endfor %}",
}
# How they write them as JSON, where that is not as usual.
FORMS: dict[str, dict[str, Any]] = {
    "indented": {"indent": 4},
    "compact": {"separators": (",", ":")},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {"é": {"type": "string"}}}},
    }
    for name in ("find", "book", "find_all")
]
CALL = {"type": "function", "function": {"name": "find", "arguments": {"é": "x"}}}
TOOL_CHAT: Chat = [
    {"role": "system", "content": "Use " + json.dumps(TOOLS[1]["function"], ensure_ascii=False)},
    {"role": "user", "content": f"What is {json.dumps(TOOLS[0], ensure_ascii=False)}?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"found": 1}'},
]
ROLES = [(), ("user",), ("tools",), ("system", "tool"), get_args(Role)]
ASK = "  Where is \U0001f642 the 'tower' of Paris?\n"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ASK},
    {"role": "assistant", "content": '<think>\nhm </think>\n\n In "Paris".\n'},
    {"role": "user", "content": "7310.1.(No!) 73107.2.) \ue0001\ue001"},
    {"role": "assistant", "content": "<user>No!\n<assistant>"},
    {"role": "user", "content": "Thanks."},
]
CONTENTS = st.text(st.sampled_from("ab <>\n.()7310{}'\"%\U0001f642"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("umim-docs-llama")


def unspelled(schema: str, *more: str) -> list[str]:
    """Return what stands in a schema between its function's name, é and other words in quotes."""
    for name in ("find", "book", "find_all", "é", *more):
        schema = schema.replace(f'"{name}"', '"\0')
    return schema.split("\0")


def said(chat: list[dict[str, Any]]) -> list[str]:
    contents = [message["content"].strip() for message in chat if message["role"] == "user"]
    return [content for content in contents if content]


@pytest.mark.parametrize("name", FAITHFUL)
@given(contents=st.lists(CONTENTS, max_size=6))
def test_all_that_users_say_may_merge_and_nothing_else(
    tokenizer: PreTrainedTokenizerBase, name: str, contents: list[str]
) -> None:
    tokenizer.chat_template = FAITHFUL[name]
    roles = ("user", "assistant")
    more = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    for chat in (CHAT, CHAT[:2], [CHAT[0], *more, {"role": "user", "content": "b"}]):
        written = write_chat(chat, tokenizer)
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
        assert written.text == tokenizer.apply_chat_template(
            parts if name == "parts" else chat, add_generation_prompt=True, tokenize=False
        )
        found = [written.text[start:end] for start, end in written.places]
        if "json" in name:  # escapes stay raw
            assert set(found) <= set(said(chat))
        elif "letter" in name:  # marks hide the first letter: what stands around it may stay raw
            assert set(found) <= set(said(chat)) and ("<" in "".join(contents) or written.places)
        else:
            assert found == said(chat) and not written.unmerged
            assert sorted(written.places) == written.places
            assert written.text[: written.end].endswith(chat[-1]["content"].strip())
        ids, ranges = encode_parts(tokenizer, written.text, written.places)
        assert list(ids) == tokenizer.encode(written.text, add_special_tokens=False)
        borders = [token for place in ranges for token in place]
        assert borders == sorted(borders) and all(a < b for a, b in ranges)


@pytest.mark.parametrize("name", FAITHFUL)
def test_parts_of_texts_are_texts(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    tokenizer.chat_template = FAITHFUL[name]
    split = [
        {**m, "content": [{"type": "text", "text": part} for part in (m["content"], "")]}
        for m in CHAT
    ]
    assert write_chat(split, tokenizer) == write_chat(CHAT, tokenizer)


@pytest.mark.parametrize("name", TOOLED)
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_the_parts_of_these_roles_may_merge_and_nothing_else(
    tokenizer: PreTrainedTokenizerBase, name: str, roles: tuple[Role, ...]
) -> None:
    """Schemas stand in messages, too: there they are what the message says."""
    tokenizer.chat_template = TOOLED[name]
    form = FORMS.get(name, {})
    dumped = [
        part
        for tool in TOOLS
        for part in unspelled(
            json.dumps(tool["function"] if name == "function" else tool, ensure_ascii=False, **form)
        )
    ]
    said = [(m["role"], m["content"]) for m in TOOL_CHAT if m["role"] in roles]
    cut = {role: text.split("1") if role == "tool" else [text] for role, text in said}
    expected = [part for role, _ in said for part in cut[role]]
    schemas = dumped if "tools" in roles else []
    expected = expected + schemas if name == "behind" else schemas + expected
    for chat in (TOOL_CHAT, TOOL_CHAT[:2]):
        written = write_chat(chat, tokenizer, TOOLS, roles)
        assert written.text == tokenizer.apply_chat_template(
            chat, tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        found = [written.text[start:end] for start, end in written.places]
        left_out = cut.get("tool", []) if len(chat) < len(TOOL_CHAT) else []
        assert found == [text for text in expected if text not in left_out]
        assert not written.unmerged


@given(contents=st.lists(CONTENTS, max_size=5), cut=st.integers(1, 6))
def test_a_longer_chat_begins_with_the_parts_of_the_shorter(
    tokenizer: PreTrainedTokenizerBase, contents: list[str], cut: int
) -> None:
    tokenizer.chat_template = TOOLED["each"]
    roles = ("user", "assistant", "tool")
    more = [{"role": roles[n % 3], "content": text} for n, text in enumerate(contents)]
    chat = [TOOL_CHAT[0], *more, {"role": "user", "content": "b"}]
    whole = write_chat(chat, tokenizer, TOOLS, get_args(Role))
    part = write_chat(chat[:cut], tokenizer, TOOLS, get_args(Role))
    assert whole.places[: len(part.places)] == part.places
    assert whole.text.startswith(part.text.removesuffix("<assistant>"))


@pytest.mark.parametrize("name", TOOLED)
def test_a_schema_in_a_reply_stays_raw(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Where tools are written behind messages, a reply that quotes one comes first."""
    tokenizer.chat_template = TOOLED[name]
    quoted = [json.dumps(t, ensure_ascii=False, **FORMS.get(name, {})) for t in TOOLS]
    reply = {"role": "assistant", "content": "".join(quoted)}
    chat = [TOOL_CHAT[1], reply, {"role": "user", "content": "b"}]
    written = write_chat(chat, tokenizer, TOOLS, ("tools",))
    start = written.text.index("<assistant>" + reply["content"])
    assert len(written.places) == 3 * len(TOOLS) and not written.unmerged
    assert all(
        (at < start) == (name != "behind") and not start < at < start + len(reply["content"])
        for at, _ in written.places
    )


@pytest.mark.parametrize(
    ("template", "chat", "what"),
    [
        (FAITHFUL["plain"], TOOL_CHAT[:2], "tools"),
        ("{{ tools | length }}" + FAITHFUL["plain"], TOOL_CHAT, "calls of tools"),
    ],
)
def test_a_template_that_drops_tools_or_calls_is_refused(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, what: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(GenerationError, match=f"must write its {what}"):
        write_chat(chat, tokenizer, TOOLS)


@pytest.mark.parametrize("names", [("default", "tool_use"), ("default",), ("tool_use", "rag"), ()])
def test_of_several_templates_the_one_is_taken_that_transformers_takes(
    tokenizer: PreTrainedTokenizerBase, names: tuple[str, ...]
) -> None:
    tooled = "{% if tools %}{{ tools | tojson }}{% endif %}" + _LOOP % _CALLS
    tokenizer.chat_template = {name: f"{name}: {tooled}" for name in names}
    for tools in (None, TOOLS):
        try:
            expected = tokenizer.apply_chat_template(
                [dict(message) for message in TOOL_CHAT[:2]], tools,
                tokenize=False, add_generation_prompt=True,
            )  # fmt: skip
        except ValueError:
            said = f"the only one or one named default; got .*{', '.join(sorted(names))}"
            with pytest.raises(GenerationError, match=said):
                write_chat(TOOL_CHAT[:2], tokenizer, tools)
        else:
            assert write_chat(TOOL_CHAT[:2], tokenizer, tools).text == expected
    if "tool_use" in names:  # one that writes no tools is found out, whatever the others write
        tokenizer.chat_template["tool_use"] = "other " + FAITHFUL["plain"]
        with pytest.raises(GenerationError, match="must write its tools"):
            write_chat(TOOL_CHAT[:2], tokenizer, TOOLS)


def test_schemas_in_a_form_of_their_own_stay_raw_and_this_is_said(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    template = "{% for t in tools %}type {{ t.function.name }};{% endfor %}" + FAITHFUL["plain"]
    tokenizer.chat_template = template
    written = write_chat(TOOL_CHAT[:2], tokenizer, TOOLS, ("user", "tools"))
    assert "as JSON" in written.unmerged and len(written.places) == 1
    assert not write_chat(TOOL_CHAT[:2], tokenizer, TOOLS).unmerged


@pytest.mark.parametrize("roles", ["user", ["users"], ["user", "user"], [5], {"user"}, None])
def test_what_is_no_role_is_refused(roles: Any) -> None:
    with pytest.raises(ConfigError, match="roles must be some of user, system, tools, tool"):
        check_roles(roles)


@pytest.mark.parametrize("tools", [[], "find", [5], {"a": 1}, [["find"]]])
def test_what_is_no_list_of_schemas_is_refused(
    tokenizer: PreTrainedTokenizerBase, tools: Any
) -> None:
    tokenizer.chat_template = TOOLED["each"]
    with pytest.raises(GenerationError, match="tools must be a list of schemas"):
        write_chat(TOOL_CHAT[:2], tokenizer, tools)


@pytest.mark.parametrize("name", REWRITING)
def test_what_a_template_changes_stays_raw_and_is_said(
    tokenizer: PreTrainedTokenizerBase, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = REWRITING[name]
    written = write_chat(CHAT, tokenizer)
    assert "changes what users say" in written.unmerged
    found = [written.text[start:end] for start, end in written.places]
    assert found == [text for text in said(CHAT)[1:] if text in written.text and name != "cut"]
    assert "Paris" not in caplog.text


@pytest.mark.parametrize("otherwise", ["", "{{ raise_exception('an odd role') }}"])
def test_a_template_that_knows_no_developer_reads_a_system_prompt(
    tokenizer: PreTrainedTokenizerBase, otherwise: str
) -> None:
    known = "{% if m['role'] in ('system', 'user', 'tool') %}{{ m['content'] }}{% else %}"
    tokenizer.chat_template = _LOOP % (known + otherwise + "{% endif %}")
    texts = ("Be brief.", "Which city?", "Paris")
    chats: list[Chat] = [
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        for roles in (("developer", "user", "function"), ("system", "user", "tool"))
    ]
    odd, common = (write_chat(chat, tokenizer) for chat in chats)
    assert odd == common


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("parts", [False, True])
def test_a_template_that_drops_what_is_said_is_refused(
    tokenizer: PreTrainedTokenizerBase, name: str, parts: bool
) -> None:
    tokenizer.chat_template = DROPPING[name]
    chat = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if parts else m for m in CHAT
    ]
    with pytest.raises(GenerationError, match="must write what its messages say"):
        write_chat(chat, tokenizer)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in ("loops", "calls") else name
        for name in HOSTILE
    ],
)
def test_a_hostile_template_ends_in_one_error(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    tokenizer.chat_template = HOSTILE[name]
    began = os.times().children_user
    with pytest.raises(GenerationError, match="in seconds and in bounded memory"):
        write_chat(CHAT, tokenizer)
    assert os.times().children_user - began < 10
    tokenizer.chat_template = FAITHFUL["plain"]
    assert write_chat(CHAT, tokenizer).places  # the next one is served


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("kill -PROF $$", "in bounded memory.*; got .*does not end in seconds"),
        ("kill -KILL $$", "in bounded memory.*; got .*more memory"),
        ("kill -SEGV $$", "in bounded memory.*; got .*more memory"),
        ("kill -TERM $$", "must start and live; got exit status -15"),
        ("exit 1", "must start and live; got exit status 1"),
        ("""printf '{"text": "half'""", "must start and live; got exit status 0"),
        (None, "must start and live; got .*No such file"),
    ],
)
def test_the_end_of_the_process_that_writes_chats_is_told_by_its_kind(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: str | None,
    message: str,
) -> None:
    program = tmp_path / "python"
    if ends is not None:
        program.write_text(f"#!/bin/sh\nread request\n{ends}\n")
        program.chmod(0o700)
    tokenizer.chat_template = FAITHFUL["plain"]
    with monkeypatch.context() as patched:
        patched.setattr(template_process, "_writers", {})
        patched.setattr(sys, "executable", str(program))
        with pytest.raises(GenerationError, match=message):
            write_chat(CHAT, tokenizer)


def test_a_hard_bound_of_memory_below_the_worker_s_own_is_no_fault() -> None:
    request = {"template": "{{ messages }}", "messages": [], "tools": None, "names": {}}
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-c"),
            "import resource, runpy, sys\n"
            "resource.setrlimit(resource.RLIMIT_AS, (1000 << 20, 1000 << 20))\n"
            "runpy.run_path(sys.argv[1], run_name='__main__')",
            str(Path(template_process.__file__).with_name("template_worker.py")),
        ],
        input=json.dumps(request) + "\n",
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == '{"text": "[]"}\n', done.stderr


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "a \ud83d b"}],
        [{"role": "\ud83d", "content": "a"}],
        [{"role": "user", "content": "a"}, "b"],
        [{"content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"a"}}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
        [{"role": "user", "content": "a", "more": [CHAT[0]] * 3 + [None]}, None],
    ],
)
@pytest.mark.parametrize("content", ["{{ m['content'] | string | trim }}", _PARTS])
def test_a_malformed_chat_is_refused(
    tokenizer: PreTrainedTokenizerBase, chat: Any, content: str
) -> None:
    tokenizer.chat_template = _LOOP % content
    with pytest.raises(GenerationError):
        written = write_chat(chat, tokenizer)
        encode_parts(tokenizer, written.text, written.places)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("plain", "hi there"), ("trim", ""), ("think", "</think>")),
        *(
            pytest.param(name, content, marks=pytest.mark.full)
            for name, content in (("plain", ""), ("think", ""), ("upper replies", "hi there"))
        ),
    ],
)
def test_writing_a_chat_is_linear_in_its_size(
    tokenizer: PreTrainedTokenizerBase, name: str, content: str
) -> None:
    """32,000 empty messages took 30 s where every mark was looked for from the beginning."""
    tokenizer.chat_template = FAITHFUL[name]
    roles = ("user", "assistant") * 8_000
    chat = [{"role": role, "content": content} for role in roles]
    write_chat(chat[:2], tokenizer)
    began = time.process_time()
    written = write_chat(chat, tokenizer)
    encode_parts(tokenizer, written.text, written.places)
    assert time.process_time() - began < 3  # about a half; quadratic, 7 of 30
    assert len(written.places) == (len(chat) // 2 if content else 0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("behind", "other") else pytest.param(name, marks=pytest.mark.full)
        for name in (*TOOLED, "other")
    ],
)
def test_finding_tools_is_linear_in_their_number(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Each looked for from the beginning, 20,000 that stand there in another form took 78 s."""
    other = "{% for t in tools %}{{ t.function.name }};{% endfor %}" + FAITHFUL["plain"]
    tokenizer.chat_template = TOOLED.get(name, other)
    about = 'x\\"' * 30  # what ends no text
    tools = [{**TOOLS[0], "function": {"name": f"f{n}", "about": about}} for n in range(8_000)]
    tools[0]["function"]["about"] = '\\"' * 100_000
    write_chat(TOOL_CHAT[:2], tokenizer, TOOLS)
    began = time.process_time()
    written = write_chat(TOOL_CHAT[:2], tokenizer, tools, ("tools",))
    assert time.process_time() - began < 5  # quadratic, 12 of 78
    assert len(written.places) == (0 if name == "other" else 2 * len(tools))


@pytest.mark.parametrize("indent", [None, 4])
def test_what_calls_spell_stays_raw_in_schemas(
    tokenizer: PreTrainedTokenizerBase, indent: int | None
) -> None:
    """Names of functions and parameters, in objects, too, types but of texts, values to choose."""
    tokenizer.chat_template = TOOLED["indented" if indent else "each"]
    nested = {"type": "object", "properties": {'lon\\g"': {"type": "number"}}}
    properties = {
        "é": {"type": "string", "description": 'The "é" or "name": "x", "é": {}.'},
        "type": {"type": "string", "enum": ["a]b", ["c", {"d": 1}], 2], "default": "a b"},
        "items": {"type": "array", "items": nested},
        "properties": {"anyOf": [{"const": "f g"}, {"properties": {"enum": {"const": -1.5}}}]},
        "const": {"const": {"properties": {"p": True}}},
    }
    function = {"name": "find", "description": '\\"' * 9, "parameters": {"properties": properties}}
    tool = {"type": "function", "function": {**function, "required": ["é", "type"]}}
    written = write_chat(TOOL_CHAT[:2], tokenizer, [tool], ("tools",))
    pairs = itertools.pairwise(written.places)
    raw = ["".join(written.text[a:b].split()) for (_, a), (b, _) in pairs]
    inner = ['items"', "array", 'lon\\\\g\\""', "number", 'properties"', 'fg"', 'enum"', "-1.5"]
    choices = ['["a]b",["c",{"d":1}],2]', *inner, 'const"', '{"properties":{"p":true}}']
    assert raw == ['find"', 'é"', 'type"', *choices]


@pytest.mark.parametrize(
    ("content", "raw"),
    [
        ('{"a": "to b", "c": [true, "d", {"e": null}], "f": ""}', ["to b", "true", "d", "null"]),
        ('[{"a\\"": "b\\"c" }, "' + "d " * 17 + '", -5, 1.5e-3]', ['b\\"c', "-5", "1.5e-3"]),
        ('  {"a" : "b"}\n', ["b"]),
        (json.dumps({"a": "é" * 32, "b": "é" * 33}), ["\\u00e9" * 32]),
        ('{"a": "b"} {"c": "d"}', []),
        ('a "b": "c"', []),
    ],
)
def test_short_values_in_results_stay_raw(
    tokenizer: PreTrainedTokenizerBase, content: str, raw: list[str]
) -> None:
    """Answers repeat them; long texts merge, what others say and what is no JSON does whole."""
    tokenizer.chat_template = TOOLED["each"]
    chat = [{"role": role, "content": content} for role in ("user", "tool")]
    written = write_chat(chat, tokenizer, TOOLS, ("user", "tool"))
    (first, end), *places = written.places
    assert written.text[first:end] == content.strip()
    assert (places[0][0], places[-1][1]) == (
        written.text.rindex(content.strip()),
        written.text.rindex(content.strip()) + len(content.strip()),
    )
    assert [written.text[a:b] for (_, a), (b, _) in itertools.pairwise(places)] == raw


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"place": {"type": "string"}, "unit": {"enum": ["C"]}}, ["place", "unit", '["C"]']),
        ({"type": "object", "days": {"type": "number"}}, ["days"]),
        ({"$defs": {"day": {"type": "string"}}, "properties": {"when": {}}}, ["when"]),
        ({"$defs": {"properties": {"type": "object", "properties": {"city": {}}}}}, ["city"]),
        ({"properties": {"parameters": {"properties": {"a": {}}}}}, ["parameters", "a"]),
        ({"properties": {}, "patternProperties": {"properties": {"const": 1}}}, ["1"]),
        ([{"name": "place", "type": "string"}], ["place"]),
        ({"properties": {"n": {"type": ["string", "null"]}}}, ["n", '["string", "null"]']),
    ],
)
def test_names_of_parameters_stay_raw_however_a_schema_says_them(
    tokenizer: PreTrainedTokenizerBase, parameters: object, names: list[str]
) -> None:
    tokenizer.chat_template = TOOLED["each"]
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    written = write_chat(TOOL_CHAT[:2], tokenizer, [tool], ("tools",))
    pairs = itertools.pairwise(written.places)
    raw = [written.text[a:b] for (_, a), (b, _) in pairs]
    spelled = {"find", "$defs", "number", *names}
    assert {"find", *names} <= {text.removesuffix('"') for text in raw} <= spelled
    assert 'find"' in raw
