"""Of chats, contexts of lm-eval merge what roles say: a checkpoint's, or those of an argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError
from umim_core.evaluation.harness import UmimLM
from umim_core.text.roles import Role

TEMPLATE = "{% for m in messages %}near the {{ m['content'] }} the cat{% endfor %}"
CHAT = [
    {"role": "system", "content": "the dog"},
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "on the mat"},
]


@pytest.mark.parametrize(
    ("recommended", "said", "merged"),
    [
        (("user",), None, ["cat sat"]),
        (("user", "system"), None, ["dog", "cat sat"]),
        (("user", "system"), "user", ["cat sat"]),
        (("user",), "user+system", ["dog", "cat sat"]),
        (("user",), ["system"], ["dog"]),
    ],
)
def test_the_contents_of_these_roles_may_merge(
    checkpoint_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recommended: tuple[Role, ...],
    said: str | list[Role] | None,
    merged: list[str],
) -> None:
    made = Checkpoint.load(checkpoint_path).recommending("prompt", 0, recommended)
    model = UmimLM(made, device="cpu", roles=said)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    text = model.apply_chat_template(CHAT)
    ids = model.tok_encode(text)
    parts = model.chats.parts(text, ids)
    assert parts is not None
    # A blank belongs to the word behind it: the first word is partly the template's.
    assert [model.tok_decode(ids[start:end]).strip() for start, end in parts] == merged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": "users"}, "roles must be some of user, system, tools, tool"),
        ({"roles": "user", "merge": "none"}, "roles say whose contents of a chat merge"),
    ],
)
def test_roles_that_are_none_or_change_nothing_are_refused(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        UmimLM(**options)
