"""Merged prompts: equality with the matcher, prefixes of a growing chat, bad prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.processes import output_of
from support.source_tree import ROOT
from umim_core.embedded.assets import embedded_path
from umim_core.errors import ConfigError, GenerationError
from umim_core.rules.matcher import Matcher, segment_prefix
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.span_files import SpanTable
from umim_core.text.chat_parts import content_places, encode_parts

VOCAB = 1000
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}<|endoftext|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
Spans = list[tuple[int, ...]]


def merger(spans: Spans, raw_tail: int = 0, vocab_size: int = VOCAB) -> PromptMerger:
    return PromptMerger(SpanTable(RuleSet.from_spans(spans), vocab_size, raw_tail))


def oracle(
    ids: Sequence[int], spans: Spans, ranges: Sequence[tuple[int, int]], raw_tail: int
) -> list[int]:
    """Longest span first, left to right, in a dictionary of spans in the order of their ids."""
    known = {
        span: VOCAB + i for i, span in enumerate(sorted(set(spans), key=lambda s: (len(s), s)))
    }
    last = [-1] * len(ids)  # where a span that covers this token must end
    for first, end in ranges:
        last[first:end] = [max(first, end - raw_tail)] * (end - first)
    merged, at = [], 0
    while at < len(ids):
        for n in (4, 3, 2):
            unit = known.get(tuple(ids[at : at + n]))
            if unit is not None and at + n <= last[at]:
                merged.append(unit)
                at += n
                break
        else:
            merged.append(ids[at])
            at += 1
    return merged


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    directory = embedded_path("umim-docs-gpt2", "checkpoint")
    assert directory is not None
    return RuleSet.load(directory / "rules")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(embedded_path("umim-docs-gpt2", "backbone"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle_on_random_texts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        alphabet = int(rng.integers(2, 40))
        spans = [tuple(rng.integers(0, alphabet, rng.integers(2, 5)).tolist()) for _ in range(50)]
        ids = rng.integers(0, alphabet, rng.integers(0, 80)).tolist()
        cuts = sorted(rng.integers(0, len(ids) + 1, 2 * int(rng.integers(1, 4))).tolist())
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        raw_tail = int(rng.integers(0, 6))
        own = merger(spans, raw_tail)
        merged = own.merge(ids, ranges)
        assert merged == oracle(ids, spans, ranges, raw_tail)
        assert own.merge(ids, raw_tail=2) == oracle(ids, spans, [(0, len(ids))], 2)
        assert own.expand(merged) == ids


def test_equals_the_matcher_on_two_hundred_real_texts(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)
    rng, size = np.random.default_rng(0), len(tokenizer)
    own, matcher = PromptMerger(SpanTable(rules, size, 16)), Matcher(rules)
    order = [tuple(row) for n in (2, 3, 4) for row in rules.ids_by_order[n].tolist()]
    merges = 0
    for _ in range(200):
        start = int(rng.integers(0, len(ids) - 300))
        part = ids[start : start + int(rng.integers(1, 300))]
        starts, lengths = segment_prefix(matcher.segment, part, max(0, len(part) - 16))
        merged = own.merge(part.tolist())
        spans = [tuple(part[s : s + n].tolist()) for s, n in zip(starts, lengths, strict=True)]
        assert [order[i - size] if i >= size else (i,) for i in merged] == spans
        assert own.expand(merged) == part.tolist()
        merges += int((lengths > 1).sum())
    assert merges > 200


def test_units_of_a_chat_begin_those_of_the_next_turn(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = PromptMerger(SpanTable(rules, len(tokenizer), 4))

    def write(chat: Sequence[Any]) -> str:
        return str(
            tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
        )

    asked = "Return the sum of the array elements over a given axis. If None, the sum of all."
    chat = [{"role": "system", "content": "Return the sum of the array elements over an axis."}]
    begun: list[int] = []
    for turn in range(4):
        chat.append({"role": "user", "content": f"{asked} ({turn})"})
        text = write(chat)
        ids, ranges = encode_parts(tokenizer, text, content_places(chat, text, write))
        merged = own.merge(ids, ranges)
        assert own.expand(merged) == ids.tolist()
        assert len(ranges) == turn + 1
        assert len(merged) < len(ids) - 4 * turn
        assert merged[: len(begun)] == begun
        reply = "The sum of the array elements over the axis."
        chat.append({"role": "assistant", "content": reply})
        begun = merged + tokenizer(reply)["input_ids"]


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    SpanTable(RuleSet.from_spans([(1, 2)]), VOCAB, 0).write(tmp_path)
    probe = (
        "import sys\nfrom pathlib import Path\n"
        "from umim_core.serving.prompt_merger import PromptMerger\n"
        "import umim_core.text.chat_parts\n"
        f"print(PromptMerger.load(Path({str(tmp_path)!r})).merge([1, 2]))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert output_of(sys.executable, "-c", probe).splitlines() == ["[1000]", "[]"]


@pytest.mark.parametrize(
    ("ids", "ranges", "raw_tail", "message"),
    [
        ([1, VOCAB], None, 0, "ids must lie between 0 and 999"),
        ([1.5], None, 0, "must be a list of token ids"),
        ([[1], [1, 2]], None, 0, "must be a list of token ids"),
        (["a"], None, 0, "must be a list of token ids"),
        ([1, 2, 3], [(0, 2), (1, 3)], 0, "ranges must follow each other"),
        ([1, 2, 3], [(-2, 1)], 0, "ranges must follow each other"),
        ([1, 2, 3], None, "3", "raw_tail must be an integer of at least 0"),
    ],
)
def test_bad_prompts_are_refused(ids: Any, ranges: Any, raw_tail: Any, message: str) -> None:
    with pytest.raises((GenerationError, ConfigError), match=message):
        merger([(1, 2)]).merge(ids, ranges, raw_tail=raw_tail)
