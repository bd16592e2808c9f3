"""Questions of a generated corpus: read, turned into prompts, chosen, shared out to splits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umim_core.config.corpus import QUESTION_FIELD, SPLITS, GeneratedCorpus, SplitFractions
from umim_core.errors import ConfigError, CorpusError
from umim_core.text.readers import BadRows, iter_documents
from umim_core.text.token_ids import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompter:
    """Turn questions into the token ids that a model continues.

    Raises:
        ConfigError: If the chat template is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, corpus: GeneratedCorpus) -> None:
        if corpus.chat == "template" and tokenizer.chat_template is None:
            raise ConfigError(
                "chat 'template' needs a tokenizer with a chat template",
                corpus.model,
                "Use chat 'none', or a model that was trained for chats.",
            )
        self._tokenizer = tokenizer
        self._template = corpus.template
        self._chat = corpus.chat

    def question_tokens(self, question: str) -> int:
        """Return how many tokens a question has on its own."""
        return len(encode(self._tokenizer, question))

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of a question's prompt, with the tokens a text begins with."""
        text = self._template.replace(QUESTION_FIELD, question)
        if self._chat == "template":
            turn = [{"role": "user", "content": text}]
            text = str(
                self._tokenizer.apply_chat_template(
                    turn, tokenize=False, add_generation_prompt=True
                )
            )
        # A chat template writes the first tokens itself.
        encoding = self._tokenizer(text, add_special_tokens=self._chat == "none", verbose=False)
        ids: list[int] = encoding["input_ids"]
        return ids


@dataclass
class Selection:
    """The questions that are asked, and what became of the others."""

    texts: list[str] = field(default_factory=list)
    too_long: int = 0
    duplicates: int = 0
    bad_rows: int = 0


def select_questions(corpus: GeneratedCorpus, prompter: Prompter) -> Selection:
    """Read the questions of all sources.

    Raises:
        CorpusError: If a source cannot be used, or fewer than three questions are left, which make
            no three splits.
    """
    selection = Selection()
    seen: set[str] = set()
    for source in corpus.questions:
        bad = BadRows()
        for text in iter_documents(source, bad):
            if text in seen:
                selection.duplicates += 1
                continue
            seen.add(text)
            tokens = prompter.question_tokens(text)
            room = tokens <= corpus.max_question_tokens and (
                len(prompter.prompt(text)) < corpus.max_tokens
            )
            if room and tokens:
                selection.texts.append(text)
            else:
                selection.too_long += tokens > 0
                selection.bad_rows += tokens == 0  # white space to this tokenizer
        selection.bad_rows += bad.count
    if len(selection.texts) < len(SPLITS):
        raise CorpusError(
            f"a generated corpus needs at least {len(SPLITS)} different questions of at most "
            f"{corpus.max_question_tokens} tokens",
            f"{len(selection.texts)}, and {selection.too_long} too long",
            "Name more questions, or raise max_question_tokens.",
        )
    return selection


def split_questions(texts: Sequence[str], fractions: SplitFractions, seed: int) -> list[str]:
    """Share questions out to the splits by the order of their hashes.

    Returns:
        The split of each question. It does not depend on the order of the questions.
    """
    order = sorted(
        range(len(texts)),
        key=lambda index: hashlib.sha256(f"{seed}:{texts[index]}".encode()).digest(),
    )
    held_out = {name: max(1, round(getattr(fractions, name) * len(texts))) for name in SPLITS[1:]}
    while len(texts) - sum(held_out.values()) < 1:
        held_out[max(held_out, key=lambda name: held_out[name])] -= 1
    chosen = ["train"] * len(texts)
    start = 0
    for name, count in held_out.items():
        for index in order[start : start + count]:
            chosen[index] = name
        start += count
    return chosen
