"""``umim generate --chat`` in this process: template, system message, the model's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.command_line import Umim
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.merging.merged_model import MergedModel

# The system's part is w10 where nobody gives another; w11 comes before a message, w12 before the
# reply.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}w10 {% endif %}{% for m in messages %}"
    "{{ 'w11 ' if m.role == 'user' else '' }}{{ m.content }} {% endfor %}w12"
)


@pytest.fixture(scope="module")
def chatty(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_umim: UMIM,
) -> Path:
    """A checkpoint whose backbone has a chat template and samples by its own settings."""
    folder = tmp_path_factory.mktemp("chatty")
    model = tiny_model("llama", 0)
    model.generation_config.update(do_sample=True, temperature=50.0)
    model.save_pretrained(folder / "backbone")
    tiny_tokenizer.save_pretrained(folder / "backbone")
    (folder / "backbone" / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    backbone = load_backbone(str(folder / "backbone"))
    own = tiny_umim.merged_model
    made = Checkpoint.of(MergedModel(backbone, own.module, own.matcher, "compact"))
    made.recommending("all").save(folder / "merge")
    return folder / "merge"


@pytest.fixture
def chat(umim: Umim, chatty: Path) -> Umim:
    """Send a message of merging words, nine tokens for the reply."""
    options = ("--max-new-tokens", 9, "--dtype", "float32")
    return partial(umim, "generate", "w1 w2 w9", "-c", chatty, *options)


def test_a_chat_shows_template_message_and_token_reduction(chat: Umim) -> None:
    lines = chat("--chat", "--greedy").out.splitlines()
    assert lines[0].startswith("w10 w11[ w1 w2] w9 w12")
    assert lines[1].startswith("6 prompt tokens -> 5 units, token reduction 16.7%")


def test_a_reply_alone_is_that_of_the_library(chat: Umim, chatty: Path) -> None:
    message = [{"role": "user", "content": "w1 w2 w9"}]
    reply = UMIM.from_pretrained(chatty, dtype="float32").generate(
        message, max_new_tokens=9, do_sample=False
    )
    assert chat("--chat", "--greedy", "--no-show").out == reply.text[0] + "\n"


def test_a_system_message_without_a_chat_is_refused(chat: Umim) -> None:
    result = chat("--system", "w5")
    assert (result.code, result.out) == (1, "")
    assert "a system message belongs to a chat" in result.err and "Add --chat." in result.err
