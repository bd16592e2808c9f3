"""``lm_eval --model umim`` and ``UMIM.generate`` merge the same spans where neither is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge
from umim_core.evaluation.harness import UmimLM
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Generation

TEXT = "the cat sat on the mat and the dog sat on the log near the old cat house"
ASKED = {"until": ["zz"], "max_gen_toks": 6, "do_sample": False}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """What every engine returns, in order."""
    found: list[Generation] = []
    generate = Engine.generate

    def kept(self: Engine, *args: object, **options: object) -> Generation:
        found.append(generate(self, *args, **options))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(Engine, "generate", kept)
    return found


@pytest.mark.parametrize(
    ("recommended", "said"),
    [
        (("prompt", 4), {}),
        (("prompt", 0), {}),
        (("all", 0), {}),
        (("none", 0), {}),
        (("prompt", 4), {"merge": "all"}),
        (("all", 0), {"merge": "prompt"}),
        (("prompt", 4), {"raw_tail": 0}),
        (None, {}),
    ],
)
def test_both_merge_the_same_spans(
    checkpoint_path: Path,
    outputs: list[Generation],
    caplog: pytest.LogCaptureFixture,
    recommended: tuple[Merge, int] | None,
    said: dict[str, object],
) -> None:
    made = Checkpoint.load(checkpoint_path)
    if recommended is None:  # what a checkpoint says that says nothing
        bare = {
            name: type(made.config).model_fields[name].default for name in ("merge", "raw_tail")
        }
        assert bare == {"merge": "prompt", "raw_tail": 16}
        recommended = bare["merge"], bare["raw_tail"]
    made = made.recommending(*recommended)
    caplog.set_level("INFO", "lm_eval.umim")
    model = UmimLM(made, device="cpu", **said)
    umim = UMIM(model.backbone, made)
    ours = umim.generate(TEXT, max_new_tokens=6, do_sample=False, stop_strings="zz", **said)
    [answer] = model.generate_until([Instance("generate_until", {}, (TEXT, ASKED), 0)])
    assert (model.merge, model.get_model_info()["umim"]["raw_tail"]) == (ours.merge, ours.raw_tail)
    assert f"merge={ours.merge}, raw_tail={ours.raw_tail}" in caplog.text
    assert str(answer) == ours.text[0]
    if ours.merge != "none":  # which is lm-eval's own model
        [row] = outputs[-1].rows
        assert (row.prompt_ids, row.prompt_spans) == (ours.prompt_ids[0], ours.prompt_spans[0])
        assert (row.ids, row.generated_spans) == (ours.ids[0], ours.generated_spans[0])
        assert bool(row.prompt_spans) == (ours.token_reduction[0] > 0)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}the cat{% else %}near the{% endif %}"
    " {{ m['content'] }} the cat sat on{% endfor %}"
    "{% if add_generation_prompt %} the cat{% endif %}"
)
CHAT = [
    {"role": "system", "content": "the dog"},
    {"role": "user", "content": "the cat sat on the mat and the cat"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "the dog sat on the log"},
]


@pytest.mark.parametrize("said", [{}, {"raw_tail": 0}, {"merge": "all"}])
def test_chats_merge_what_users_say_alone(
    checkpoint_path: Path,
    outputs: list[Generation],
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, object],
) -> None:
    made = Checkpoint.load(checkpoint_path).recommending("prompt", 2)
    model = UmimLM(made, device="cpu", **said)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    ours = UMIM(model.backbone, made).generate(
        CHAT, max_new_tokens=4, do_sample=False, stop_strings="zz", **said
    )
    text = model.apply_chat_template(CHAT)
    asked = ASKED | {"max_gen_toks": 4}
    [answer] = model.generate_until([Instance("generate_until", {}, (text, asked), 0)])
    [row] = outputs[-1].rows
    assert str(answer) == ours.text[0]
    assert (row.prompt_ids, row.prompt_spans) == (ours.prompt_ids[0], ours.prompt_spans[0])
    spans = [model.tok_decode(row.prompt_ids[a : a + n]) for a, n in row.prompt_spans]
    assert spans and text.count("the cat") > sum("cat" in span for span in spans)
    # likelihoods read the same units before the answer
    request = Instance("loglikelihood", {}, (text, " sat"), 0)
    model.forget_sizes()
    [(score, _)] = model.loglikelihood([request])
    sizes = model.question_sizes(None)[None]
    assert sizes.units - 1 == len(row.prompt_ids) - sum(n - 1 for _, n in row.prompt_spans)
    tail = model.merged_model.raw_tail
    by_hand = UMIM(model.backbone, made).generate(
        CHAT, max_new_tokens=1, do_sample=False, logprobs=len(model.tokenizer), **said
    )
    [word] = model.tok_encode(" sat")
    top = dict(by_hand.top_logprobs[0][0])
    assert tail == by_hand.raw_tail
    assert score == pytest.approx(top[word], abs=1e-5)
