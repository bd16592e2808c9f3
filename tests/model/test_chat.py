"""Chats: what of them merges, and how they go on under templates that trim or change them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError
from umim_core.model.generation_output import GenerationOutput
from umim_core.rules.ruleset import RuleSet
from umim_core.text.roles import Role

# As published models write chats; the special tokens are plain text here, but for the end.
END = "<|endoftext|>"
TEMPLATES = {
    "llama-3": (
        "{{ '<|begin|>' }}{% for m in messages %}"
        "{{ '<|start|>' + m['role'] + '<|sep|>\n\n' + m['content'] | trim + '<|endoftext|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>\n\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
        "+ '<|endoftext|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + m['content'] | trim + '<|endoftext|>' }}{% endif %}{% endfor %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] | trim + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
}
REPLIES = (" Sure, the sum.\n\n", "Sure,\n the sum", "  \n The array. " + END, END)


def say(
    umim: UMIM, chat: list[dict[str, str]], reply: str, last: GenerationOutput | None
) -> GenerationOutput:
    """Let the model reply, and add what a caller would: the text that was returned."""
    ids = umim.backbone.encode(reply)
    left = iter(ids)

    def chosen(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[0, next(left)] = 0.0
        return forced

    past = last.state if last else None
    output = umim.generate(chat, max_new_tokens=len(ids), past=past, logits_processor=[chosen])
    assert list(output.ids[0]) == ids
    chat.append({"role": "assistant", "content": output.text[0]})
    return output


def rendered(
    umim: UMIM, chat: list[dict[str, str]], tools: list[dict[str, str]] | None = None
) -> str:
    text = umim.backbone.require_tokenizer().apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return str(text)


@pytest.fixture(scope="module")
def umim() -> UMIM:
    return UMIM.from_pretrained("umim-docs-gpt2", dtype="float32")


@pytest.fixture(params=TEMPLATES)
def chatty(request: pytest.FixtureRequest, umim: UMIM, monkeypatch: pytest.MonkeyPatch) -> UMIM:
    tokenizer = umim.backbone.require_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[request.param])
    return umim


def assert_goes_on(umim: UMIM, reply: str) -> None:
    """After three turns the state holds the conversation, as far as white space goes."""
    chat, last = [{"role": "user", "content": "Return  the sum."}], None
    for turn in range(3):
        last = say(umim, chat, reply, last)
        chat.append({"role": "user", "content": f"And now {turn}? "})
    final = umim.generate(chat, max_new_tokens=1, past=last.state)
    held = str(umim.backbone.require_tokenizer().decode(list(final.state.raw_ids[0][:-1])))
    assert "".join(held.split()) == "".join(rendered(umim, chat).split())


@pytest.mark.parametrize("reply", REPLIES)
def test_a_chat_goes_on_under_templates_that_trim(chatty: UMIM, reply: str) -> None:
    if END in reply and END not in str(chatty.backbone.require_tokenizer().chat_template):
        pytest.skip(
            "the template writes no end behind a reply: what it writes extends no such past"
        )
    assert_goes_on(chatty, reply)


def assert_refused(umim: UMIM, reply: str, **changed: str) -> None:
    """A chat does not go on if the user's words or the reply are others than before."""
    chat = [{"role": "user", "content": "Return  the sum."}]
    last = say(umim, chat, reply, None)
    for message in chat:
        message["content"] = changed.get(message["role"], message["content"])
    chat.append({"role": "user", "content": "And?"})
    with pytest.raises(GenerationError, match="must begin with what its state holds"):
        umim.generate(chat, max_new_tokens=1, past=last.state)


def test_only_white_space_may_differ(chatty: UMIM) -> None:
    for said in ("Return the sums.", "Return a sum.", "return the sum."):
        assert_refused(chatty, " Sure.\n", user=said)
    for reply in ("Sure.", "Of", ""):
        assert_refused(chatty, " Of course.\n", assistant=reply)


def test_a_template_that_drops_part_of_replies_is_refused(
    umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning models' templates write a reply's answer only; the past holds its thoughts."""
    template = TEMPLATES["chatml"].replace("m['content'] +", "m['content'].split('</think>')[-1] +")
    assert template != TEMPLATES["chatml"]
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", template)
    assert_refused(umim, "So.</think> Sure.")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Characters with byte fallback; a space stands before every piece of text, as in Llama 2."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
    vocabulary = {word: i for i, word in enumerate([*words, *map(chr, range(33, 127))])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("reply", [" Sure. \n", "Sure.", " The array.</s>"])
def test_a_chat_goes_on_where_a_tokenizer_adds_spaces_beside_special_tokens(reply: str) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.chat_template = TEMPLATES["mistral"].replace(END, "</s>")
    backbone = random_backbone(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    assert_goes_on(UMIM(backbone, Checkpoint.of(fresh_model(backbone, []))), reply)


TOOLED = (
    "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TOOLS = [{"name": "sum", "description": "Return the sum of the array."}]
SAID = "Return the sum of the array."


@pytest.fixture
def talker(umim: UMIM, monkeypatch: pytest.MonkeyPatch) -> UMIM:
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", TOOLED)
    return umim


@pytest.mark.parametrize("roles", [("user",), ("tools",), ("system", "tools"), ()])
@pytest.mark.parametrize("recommended", [False, True])
def test_the_contents_of_these_roles_merge(
    talker: UMIM, roles: tuple[Role, ...], recommended: bool
) -> None:
    umim, options = talker, {"roles": roles}
    tokenizer = talker.backbone.require_tokenizer()
    if recommended:
        checkpoint = umim.checkpoint.recommending("prompt", 0, roles)
        umim, options = UMIM(umim.backbone, checkpoint), {}
    chat = [{"role": role, "content": SAID} for role in ("system", "user")]
    tail = {"raw_tail": 0, "merge": "prompt"}
    output = umim.generate(chat, max_new_tokens=1, tools=TOOLS, **tail, **options)
    text = rendered(umim, chat, TOOLS)
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    merged = {text.rfind("\n", 0, offsets[start][0] + 1) for start, _ in output.prompt_spans[0]}
    lines = {"tools": -1, "system": text.index("\nsystem"), "user": text.index("\nuser")}
    assert merged == {lines[role] for role in roles}
    prefix = umim.prefix(chat, tools=TOOLS, **options)
    assert set(prefix.spans) == set(output.prompt_spans[0])
    asked = umim.generate(chat, max_new_tokens=1, past=prefix, tools=TOOLS, **tail, **options)
    assert asked.ids == output.ids


def test_tools_of_a_text_are_refused(umim: UMIM) -> None:
    for call in (umim.generate, umim.prefix):
        with pytest.raises(GenerationError, match="tools are of chats"):
            call("Return the sum.", tools=TOOLS)


@pytest.mark.parametrize("raw_tail", [0, 3])
@pytest.mark.parametrize("roles", [None, ["system"]])
def test_only_contents_merge_where_every_pair_of_tokens_is_a_rule(
    talker: UMIM, roles: list[Role] | None, raw_tail: int
) -> None:
    """Each on its own but for its raw tail; by default those of users."""
    chat = [{"role": role, "content": SAID} for role in ("system", "user", "assistant", "user")]
    text, tokenizer = rendered(talker, chat), talker.backbone.require_tokenizer()
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, checkpoint = encoded["input_ids"], talker.checkpoint
    rules = RuleSet.from_spans(
        set(pairwise(ids)), tokenizer_fingerprint=talker.backbone.tokenizer_fingerprint
    )
    umim = UMIM(talker.backbone, checkpoint.with_contents(checkpoint.module, rules))
    asked = {"raw_tail": raw_tail, "merge": "prompt", "roles": roles}
    expected = list[tuple[int, int]]()
    for found in re.finditer(re.escape(f"{'system' if roles else 'user'}: {SAID}"), text):
        first, end = found.end() - len(SAID), found.end()
        places = enumerate(encoded["offset_mapping"])
        inside = [k for k, (a, b) in places if first <= a < b <= end]
        inside = inside[: len(inside) - raw_tail]
        expected += [(k, 2) for k in inside[: len(inside) // 2 * 2 : 2]]
    assert umim.generate(chat, max_new_tokens=1, **asked).prompt_spans == (tuple(expected),)
    assert umim.prefix(chat, **asked).spans == tuple(expected)


def test_a_template_that_rewrites_contents_merges_nothing(
    umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    shouting = TOOLED.replace("m['content']", "m['content'] | upper")
    monkeypatch.setattr(umim.backbone.require_tokenizer(), "chat_template", shouting)
    chat = [{"role": "user", "content": "return the sum of the array elements"}]
    out = umim.generate([chat, [{"role": "user", "content": "RETURN THE SUM"}]], max_new_tokens=2)
    assert out.prompt_spans[0] == ()
    assert out.unmerged == ("its template changes what users say", "")
