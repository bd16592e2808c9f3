"""Function calls: which questions are asked, when a call is right, every side on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calls import (
    SETS,
    UNSEEN,
    Answer,
    Edit,
    Question,
    as_written,
    ask,
    bare,
    calls_of,
    cut,
    figures,
    is_right,
    minified,
    prompts,
    read_questions,
    without_descriptions,
)
from support.servers import CHATML
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.errors import GenerationError

AREA: dict[str, Any] = {
    "name": ["L'Ile"],
    "corner": [{"lateral": 10.5, "wide": [5]}],
    "zone": ["", "CET"],
}
FIND = {"place": ["Paris, FR", "Paris"], "days": [3], "units": ["C", ""], "area": ["", AREA]}
ACCEPTED = [{"find": FIND}]
WHERE = {"name": 'l"ile', "corner": {"lateral": 10.5, "wide": [5]}}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"place": "paris fr", "days": 3, "units": "C"}, True),
        ({"place": "Paris", "days": 3.0}, True),
        ({"place": "Paris", "days": "3"}, False),
        ({"place": "Paris", "days": True}, False),
        ({"place": "Paris"}, False),
        ({"place": "Paris", "days": 3, "more": 1}, False),
        ({"place": ["Paris"], "days": 3}, False),
        ({"place": "Paris", "days": 3, "area": WHERE}, True),
        ({"place": "Paris", "days": 3, "area": WHERE | {"more": 1}}, False),
        ({"place": "Paris", "days": 3, "area": WHERE | {"corner": {"lateral": 10.5}}}, False),
        ({"place": "Paris", "days": 3, "area": {"name": "L'Ile"}}, False),
    ],
)
def test_a_call_is_right_by_its_accepted_values(arguments: dict[str, Any], right: bool) -> None:
    call = {"name": "find", "arguments": arguments}
    assert is_right([call], ACCEPTED) is right
    assert not is_right([call, call], ACCEPTED) and not is_right([], ACCEPTED)
    assert is_right([call, call], [*ACCEPTED, *ACCEPTED]) is right


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ["f"]),
        ('<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}', ["f", "g"]),
        ('```json\n{"name": "f"}\n```', ["f"]),
        ('{"name": "f"}\n{"name": "g"}', ["f", "g"]),
        ('Yes: {"name": "f"}', []),
        ('```json\n{"name": "f"}\n```\n```json\n{"name": "g"}\n```', ["f", "g"]),
        ('[{"name": "f"}, {"name": "g"}]', ["f", "g"]),
        ('```json\n[{"name": "f"}]\n{"name": "g"}', ["f", "g"]),
        ('{"name": ["f"]}', []),
        ("[" * 9999, []),
        ('<tool_call>{"name": "f"</tool_call>', []),
        ("Paris.", []),
    ],
)
def test_calls_are_read_with_and_without_marks(text: str, names: list[str]) -> None:
    assert [call["name"] for call in calls_of(text)] == names


def test_descriptions_of_parameters_go_and_those_of_functions_stay() -> None:
    inner = {"properties": {"x": {"type": "string", "description": "An x."}}}
    found = without_descriptions([{"name": "f", "description": "Do f.", "parameters": inner}])
    bare = {"properties": {"x": {"type": "string"}}}
    assert found == [{"name": "f", "description": "Do f.", "parameters": bare}]


def test_right_answers_are_right_and_hold_the_first_accepted_values() -> None:
    accepted = [
        {"find": {"when": [AREA | {"hours": [[1, 2]]}], "each": [[AREA, AREA]], "none": [""]}},
        *ACCEPTED,
    ]
    calls = calls_of(Question([], [], accepted).answer())
    area = {"name": "L'Ile", "corner": {"lateral": 10.5, "wide": [5]}}
    assert calls[0]["arguments"] == {"when": area | {"hours": [1, 2]}, "each": [area, area]}
    assert calls[1]["arguments"] == {"place": "Paris, FR", "days": 3, "units": "C"}
    assert is_right(calls, accepted)


def test_every_side_is_asked_of_functions_that_no_training_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "possible_answer").mkdir()
    for name in SETS:
        inner = {"properties": {"x": {"description": "An x."}}}
        about = {"description": "Return the sum of the array.", "parameters": inner}
        names = ["unseen"] if name == UNSEEN else ["unseen", "seen"]
        tools = [{"name": n, **about} for n in names]
        rows = [
            {
                "id": t["name"],
                "question": [[{"role": "user", "content": "The sum?"}]],
                "function": [t],
            }
            for t in tools
        ]
        answers = [{"id": t["name"], "ground_truth": [{t["name"]: {"x": ["a"]}}]} for t in tools]
        for place, lines in ((tmp_path, rows), (tmp_path / "possible_answer", answers)):
            (place / f"BFCL_v4_{name}.json").write_text("\n".join(map(json.dumps, lines)))
    questions = list(read_questions(tmp_path, 5))
    assert [q.tools[0]["function"]["name"] for q in questions] == ["unseen"] * len(SETS)
    assert not list(read_questions(tmp_path, 5, after=1))
    questions = questions[:2]
    monkeypatch.setattr("benchmarks.calls.NEW", 8)
    umim = UMIM.from_pretrained("umim-docs-llama", dtype="float32")
    umim = UMIM(umim.backbone, umim.checkpoint.recommending("prompt", 0, ["tools"]))
    tokenizer = umim.backbone.require_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)

    def side(merge: Merge, edit: Edit = as_written) -> list[Answer]:
        asked = prompts(umim, questions, edit)
        found = ask(umim, asked, merge, tmp_path / "answers")
        with monkeypatch.context() as patch:
            patch.setattr(umim.engine, "generate", None)  # read again, not asked again
            assert ask(umim, asked, merge, tmp_path / "answers") == found
        return found

    base, merged = side("none"), side("prompt")
    assert minified({"a": ["b c", 1]}) == '{"a":["b c",1]}'
    for edit in (bare, cut(umim, 0.5)):
        less = side("none", edit)
        assert all(0 < one.saved < one.tools_saved for one in less)
    assert max(abs(one.tools_saved - 0.5) for one in less) < 0.05
    found = figures(merged, base)
    assert found["tools_saved"] > found["saved"]
    assert found["saved"] > 0 and figures(base, base)["saved"] == 0
    assert found["nats_error"] is not None and 0 <= found["agreement"] <= 1
    assert found["right"] == 0 and found["kept"] == [0, 0]
    monkeypatch.setattr(
        tokenizer, "chat_template", CHATML.replace("tool | tojson", "tool | string")
    )
    with pytest.raises(GenerationError, match="writes them as JSON"):
        side("none", minified)
