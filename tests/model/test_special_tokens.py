"""Special tokens that a tokenizer adds by default (a BOS) in prompts, scores and perplexity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.text.token_ids import leading_ids

WORDS = ["<eos>", *(f"w{i}" for i in range(1, 31)), "<s>"]
BOS = 31
TEXT, IDS = "w1 w2 w3 w4", [1, 2, 3, 4]
TEMPLATE = (
    "<s> {% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS), ("<eos>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def umim(
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> UMIM:
    tokenizer = with_template(word_tokenizer(WORDS), "<s> $A")
    tokenizer.chat_template = TEMPLATE
    backbone = wrap_backbone(tiny_model("llama", 0), tokenizer)
    return UMIM(backbone, Checkpoint.of(fresh_model(backbone, [(2, 3), (4, 5)], 0.2)))


@pytest.mark.parametrize(("switch", "added"), [(None, [BOS]), (True, [BOS]), (False, [])])
def test_a_prompt_is_encoded_as_the_tokenizer_does_by_default(
    umim: UMIM, switch: bool | None, added: list[int]
) -> None:
    output = umim.generate(TEXT, max_new_tokens=1, add_special_tokens=switch)
    assert list(output.prompt_ids[0]) == added + IDS
    assert list(umim.compress(TEXT, add_special_tokens=switch).ids) == added + IDS


def test_a_chat_has_the_special_tokens_of_its_template_only(umim: UMIM) -> None:
    chat = [{"role": "user", "content": TEXT}]
    for switch in (None, True):
        output = umim.generate(chat, max_new_tokens=1, add_special_tokens=switch)
        assert list(output.prompt_ids[0]) == [BOS, *IDS, 9]


def test_contexts_are_scored_behind_their_bos_and_continuations_have_none(umim: UMIM) -> None:
    table = umim.backbone.model(torch.tensor([[BOS, *IDS, 7]])).logits[0].log_softmax(-1)
    [[score]] = umim.score([TEXT], [["w7"]], merge="none")
    assert score == pytest.approx(float(table[-2, 7]), abs=1e-4)
    [[bare]] = umim.score([TEXT], [["w7"]], merge="none", add_special_tokens=False)
    assert bare != pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("merge", ["all", "none"])
def test_perplexity_of_a_text_is_that_of_its_ids_with_bos(umim: UMIM, merge: str) -> None:
    with_bos = umim.perplexity([torch.tensor([BOS, *IDS]).numpy()], merge=merge)
    bare = umim.perplexity([torch.tensor(IDS).numpy()], merge=merge)
    assert umim.perplexity(TEXT, merge=merge) == with_bos
    assert umim.perplexity(TEXT, merge=merge, add_special_tokens=False) == bare


@pytest.mark.parametrize(
    ("template", "leading"), [("<s> $A", [BOS]), ("<s> $A <eos>", [BOS]), ("$A <eos>", [])]
)
def test_leading_ids_are_what_a_tokenizer_puts_first(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    template: str,
    leading: list[int],
) -> None:
    assert leading_ids(with_template(word_tokenizer(WORDS), template)) == leading
