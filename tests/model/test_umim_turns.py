"""Streaming, chats, turns, scores and samples of the public model, on an embedded checkpoint."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.errors import EvaluationError
from umim_core.model.generation_output import TextPieces
from umim_core.text.chat_parts import write_chat

PROMPT = "Return the sum of the array elements over a given axis. The default is to"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def umim() -> UMIM:
    return UMIM.from_pretrained("umim-docs-gpt2", dtype="float32")


@pytest.fixture
def chatty(umim: UMIM, monkeypatch: pytest.MonkeyPatch) -> UMIM:
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", TEMPLATE)
    return umim


def drain(umim: UMIM, prompt: object, **options: object) -> tuple[list[str], object]:
    pieces, stream = [], umim.stream(prompt, **options)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "seed": 3},
        {"merge": "none"},
        {"raw_tail": 2},
    ],
)
def test_streamed_pieces_are_the_generated_text(umim: UMIM, options: dict[str, object]) -> None:
    pieces, output = drain(umim, PROMPT, max_new_tokens=24, **options)
    expected = umim.generate(PROMPT, max_new_tokens=24, **options)
    assert output == expected
    assert "".join(pieces) == expected.text[0]
    assert len(pieces) > 5


def test_streamed_lines_keep_the_spaces_they_begin_with() -> None:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "▁a", "b", "\n", "▁"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    backbone = random_backbone(tokenizer=tokenizer)
    pieces, ids = TextPieces(backbone), [2, 3, 4, 2, 4, 4, 5, 2, 4, 1, 2, 3, 4]
    for value in ([[2]], *([token] for token in ids)):
        pieces.put(torch.tensor(value))
    pieces.end()
    found = pieces.drain()
    assert "".join(found) == backbone.decode(ids) == "ab\n a\n\n  a\n ab\n"
    assert found[0] == "ab\n"


def test_a_stream_yields_before_the_text_is_complete(umim: UMIM) -> None:
    steps: list[int] = []
    stream = umim.stream(PROMPT, max_new_tokens=24, observer=lambda _: steps.append(1))
    next(stream)
    assert len(steps) < 6


def test_a_chat_is_rendered_by_its_template(chatty: UMIM) -> None:
    chat = [{"role": "user", "content": "Return the array."}]
    rendered = "user: Return the array.\nassistant: "
    output = chatty.generate(chat, max_new_tokens=6)
    assert output.prompt_ids[0] == tuple(chatty.backbone.encode(rendered))
    base = chatty.generate(rendered, max_new_tokens=6, merge="none")
    assert chatty.generate(chat, max_new_tokens=6, merge="none") == base
    assert chatty.generate([chat, chat], max_new_tokens=6).text == output.text * 2


def test_only_what_users_say_merges_in_a_chat(chatty: UMIM) -> None:
    said = "Return the sum of the array elements over a given axis, and the shape of the array."
    chat = [
        {"role": "system", "content": said},
        {"role": "user", "content": said},
        {"role": "assistant", "content": said},
        {"role": "user", "content": said},
    ]
    output = chatty.generate(chat, max_new_tokens=2, raw_tail=4)
    ids, decode = output.prompt_ids[0], chatty.backbone.decode
    size = len(chatty.backbone.encode(f" {said}"))
    contents = [k for k in range(len(ids)) if decode(list(ids[k : k + size])) == f" {said}"]
    assert len(contents) == 4
    spans = output.prompt_spans[0]
    inside = [
        [(a - start, n) for a, n in spans if start <= a and a + n <= start + size - 4]
        for start in contents
    ]
    assert inside[0] == inside[2] == []  # system prompt and reply
    assert inside[1] and inside[1] == inside[3]  # each message is cut on its own
    assert len(spans) == len(inside[1]) + len(inside[3])  # none touches the template or a raw tail


def test_a_growing_chat_only_appends_units(chatty: UMIM) -> None:
    """Units of turn t and the reply's ids are a prefix of turn t + 1's, so a prefix cache hits."""
    chat: list[dict[str, str]] = []
    before: list[tuple[int, ...]] = []
    for turn in range(4):
        said = f"Return the sum of the array elements over a given axis {'and shape ' * turn}."
        chat.append({"role": "user", "content": said})
        output = chatty.generate(chat, max_new_tokens=5, merge="prompt", raw_tail=3)
        units = unit_ids(output.prompt_ids[0], output.prompt_spans[0])
        assert units[: len(before)] == before
        chat.append({"role": "assistant", "content": output.text[0]})
        reply = chatty.backbone.encode(output.text[0])
        before = units + [(token,) for token in reply]
    assert sum(len(unit) > 1 for unit in before) > 4


def unit_ids(ids: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    """Raw ids as units, given the merged ones."""
    sizes, units, at = dict(spans), [], 0
    while at < len(ids):
        size = sizes.get(at, 1)
        units.append(tuple(ids[at : at + size]))
        at += size
    return units


def test_a_template_that_rewrites_contents_merges_nothing(
    umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shouting = TEMPLATE.replace("m['content']", "m['content'] | upper")
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", shouting)
    chat = [{"role": "user", "content": "return the sum of the array elements"}]
    out = umim.generate([chat, [{"role": "user", "content": "RETURN THE SUM"}]], max_new_tokens=2)
    assert out.prompt_spans[0] == ()
    assert out.unmerged == ("its template changes what users say", "")


def test_a_content_that_looks_like_the_template_is_found_where_it_stands(chatty: UMIM) -> None:
    chat = [{"role": "user", "content": "user"}, {"role": "user", "content": " user: \n"}]
    text = "user: user\nuser:  user: \n\nassistant: "
    written = write_chat(chat, chatty.backbone.require_tokenizer())
    assert (written.text, written.places) == (text, [(6, 10), (18, 23)])  # blanks at edges stay raw


def test_a_continued_chat_reads_only_what_is_new(chatty: UMIM) -> None:
    chat = [{"role": "user", "content": "Return the array."}]
    first = chatty.generate(chat, max_new_tokens=6)
    chat += [
        {"role": "assistant", "content": first.text[0]},
        {"role": "user", "content": "Return the sum."},
    ]
    second = chatty.generate(chat, max_new_tokens=6, past=first.state)
    added = "\nuser: Return the sum.\nassistant: "
    assert second.prompt_ids[0] == (first.ids[0][-1], *chatty.backbone.encode(added))


@pytest.mark.parametrize("merge", ["all", "none"])
def test_scores_are_those_of_each_continuation_alone(umim: UMIM, merge: str) -> None:
    contexts, endings = [PROMPT, "Return the"], [[" return", " use the sum of"], [" array"]]
    together = umim.score(contexts, endings, merge=merge)
    for context, row, scores in zip(contexts, endings, together, strict=True):
        for ending, score in zip(row, scores, strict=True):
            assert umim.score([context], [[ending]], merge=merge)[0][0] == pytest.approx(
                score, abs=1e-4
            )


def test_a_base_score_is_the_sum_of_the_models_log_probabilities(umim: UMIM) -> None:
    context, ending = umim.backbone.encode(PROMPT), umim.backbone.encode(" use the sum of")
    table = umim.backbone.model(torch.tensor([context + ending])).logits[0].log_softmax(dim=-1)
    rows = np.arange(len(context) - 1, len(context) + len(ending) - 1)
    expected = float(table[torch.from_numpy(rows), torch.tensor(ending)].sum())
    [[score]] = umim.score([PROMPT], [[" use the sum of"]], merge="none")
    assert score == pytest.approx(expected, abs=1e-4) and math.isfinite(score)
    assert umim.score([PROMPT], [[" use the sum of"]])[0][0] != pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
    ("contexts", "endings"), [(["a"], []), ([""], [["b"]]), (["a"], [[""]]), (["a"], [[]])]
)
def test_scores_without_tokens_are_refused(
    umim: UMIM, contexts: list[str], endings: list[list[str]]
) -> None:
    with pytest.raises(EvaluationError):
        umim.score(contexts, endings)


def test_models_of_one_checkpoint_share_no_module(umim: UMIM) -> None:
    expected = umim.generate(PROMPT, max_new_tokens=6)
    wide = UMIM.from_pretrained("umim-docs-gpt2", dtype="float64")
    UMIM(wide.backbone, umim.checkpoint)
    assert umim.generate(PROMPT, max_new_tokens=6) == expected


def test_a_bfloat16_backbone_generates() -> None:
    umim = UMIM.from_pretrained("umim-docs-llama", dtype="bfloat16")
    output = umim.generate([PROMPT, "Return"], max_new_tokens=6, logprobs=1, merge="all")
    assert output.prompt_spans[0] and all(len(ids) == 6 for ids in output.ids)
