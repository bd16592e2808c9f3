"""Tiny random backbones of every supported family, rules, prompts and the engine's oracle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from support.merged_models import placed
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import rules_under
from umim_core.rules.ruleset import RuleSet

VOCAB = 11


FAMILIES = (
    "llama", "llama-tied", "qwen2", "mistral", "gpt2", "gpt2-untied", "gpt-neo", "gpt-neox"
)  # fmt: skip
# Family, attention, type and tolerance. transformers computes some parts in float32 whatever the
# model: GPT-Neo's scores and the softmax of Llama-like eager attention.
EXACT = [(name, "sdpa", torch.float64, 1e-10) for name in FAMILIES if name != "gpt-neo"]
ROUNDED = [
    ("gpt-neo", "eager", torch.float64, 1e-5),
    ("llama", "eager", torch.float64, 1e-5),
    ("gpt2", "eager", torch.float64, 1e-10),
    ("llama", "sdpa", torch.float32, 1e-5),
    ("gpt2", "sdpa", torch.float32, 1e-5),
]


def build(
    name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa", **changes: Any
) -> Backbone:
    """A random backbone of a family whose head may be tied; GPT-Neo has eager attention alone."""
    family = re.sub("-(un)?tied", "", name)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 96}
    tied = {} if family == name else {"tie_word_embeddings": name.endswith("-tied")}
    attention = "eager" if name == "gpt-neo" else attention
    options = {"vocab_size": VOCAB, **sizes, **tied, **changes}
    return random_backbone(family, dtype, attention=attention, **options)


def module_for(backbone: Backbone, longest: int = 4) -> MergeModule:
    module = MergeModule(backbone.hidden_size, longest=longest).to(backbone.dtype)
    module.initialise(0.2, torch.Generator().manual_seed(1))
    return module.eval().requires_grad_(False)


def merging_engine(
    backbone: Backbone, matcher: Matcher, unit_positions: UnitPositions = "compact"
) -> Engine:
    """An engine that merges by the module of ``module_for``."""
    merged_model = MergedModel(backbone, module_for(backbone), matcher)
    return Engine(placed(merged_model, unit_positions))


def random_rules(seed: int, infix_free: bool, longest: int = 4) -> Matcher:
    """Rules dense enough that every few tokens complete one; long ones over two tokens alone."""
    rng = np.random.default_rng(seed)
    if longest > 4:
        sizes = [longest - 3] if infix_free else range(2, longest + 1)
        spans = {ids for n in sizes for ids in product((0, 1), repeat=n) if rng.random() < 0.4}
        spans |= {(7,) * longest}
    elif infix_free:
        spans = {tuple(rng.integers(0, VOCAB, 2).tolist()) for _ in range(100)}
    else:
        spans = {tuple(rng.integers(0, 5, rng.integers(2, 5)).tolist()) for _ in range(60)}
        spans |= {(a, b) for a in range(VOCAB) for b in range(0, VOCAB, 3)}
        spans |= {(a, 0, b) for a in range(VOCAB) for b in range(VOCAB)}
    rules = RuleSet.from_spans(spans)
    assert rules.infix_free is infix_free
    return Matcher(rules)


def priced_rules(seed: int, infix_free: bool, longest: int = 4) -> Matcher:
    """The same with prices between 0 and 1, half of them at most ``CHEAP``."""
    rules = random_rules(seed, infix_free, longest).rules
    prices = np.random.default_rng(seed).random(len(rules), dtype=np.float32)
    return Matcher(rules.with_prices(prices))


def cheap_rules(matcher: Matcher) -> Matcher:
    """The rules of at most ``CHEAP``, without prices."""
    return Matcher(rules_under(matcher.rules, CHEAP).with_prices(None))


def random_prompts(seed: int, rows: int, tokens: int = VOCAB) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tokens, rng.integers(1, 14)) for _ in range(rows)]


def settings(max_new_tokens: int = 16, **options: object) -> GenerateOptions:
    """Options of the engine, with any setting of transformers."""
    engine = {field.name for field in fields(GenerateOptions)} - set(vars(GenerationConfig()))
    own = {name: options.pop(name) for name in engine - {"n"} & options.keys()}
    return GenerateOptions(config=GenerationConfig(max_new_tokens=max_new_tokens, **options), **own)


SAMPLED = {"do_sample": True, "temperature": 1.5}
CHEAP = 0.5


def finished_row(
    prompt: Sequence[int],
    ids: Sequence[int],
    lengths: Sequence[int],
    prompt_spans: Sequence[tuple[int, int]] = (),
    generated_spans: Sequence[tuple[int, int]] = (),
) -> Row:
    """A row of these ids, merged spans and cache lengths."""

    def cut(tokens: int, spans: Sequence[tuple[int, int]]) -> Segmentation:
        inside = {place for start, size in spans for place in range(start + 1, start + size)}
        starts = np.array([place for place in range(tokens) if place not in inside], np.int64)
        return starts, np.diff([*starts, tokens])

    _, sizes = cut(len(ids) - 1, generated_spans)
    row = Row([*prompt, *ids], 0, len(prompt), cut(len(prompt), prompt_spans), sizes.tolist())
    row.cache_lengths, row.stop_reason = list(lengths), "length"
    return row


def tail_apart(prompt: Sequence[int], raw_tail: int) -> list[list[int]]:
    """A prompt as the parts that are matched apart: its last tokens one by one."""
    ids = np.asarray(prompt).tolist()
    border = max(0, len(ids) - raw_tail)
    return [ids[:border], *([token] for token in ids[border:])]


Prompt = tuple[Matcher | Sequence[Matcher], Sequence[Sequence[int]]]


def from_scratch(
    backbone: Backbone,
    module: MergeModule,
    prompts: Sequence[Prompt],
    unit_positions: UnitPositions = "compact",
) -> list[tuple[Tensor, int]]:
    """Logits after each prompt, from one fresh forward of them all, and the units that it makes.

    A prompt is parts that are matched apart, by one matcher or one a part. Nothing looks ahead: the
    padding behind a prompt is never seen.
    """
    made: dict[tuple[int, ...], Tensor] = {}
    rows, places = list[Tensor](), list[Tensor]()
    for matcher, parts in prompts:
        units, ends, raw = [], [], 0
        matchers = [matcher] * len(parts) if isinstance(matcher, Matcher) else matcher
        for ids, own in zip(parts, matchers, strict=True):
            array = np.array(ids, dtype=np.int64)
            for start, length in zip(*own.segment(array), strict=True):
                span = torch.tensor(array[start : start + length])
                if (key := tuple(span.tolist())) not in made:
                    unit, size = backbone.embed(span), torch.tensor([length])
                    made[key] = unit if length == 1 else module(unit[None], size, span[None])
                units.append(made[key])
                ends.append(raw + int(start + length) - 1)
            raw += len(array)
        rows.append(torch.cat(units))
        places.append(torch.tensor(range(len(units)) if unit_positions == "compact" else ends))
    sizes = [len(row) for row in rows]
    logits = backbone.model(
        inputs_embeds=pad_sequence(rows, batch_first=True),
        position_ids=pad_sequence(places, batch_first=True),
        # Without a mask transformers takes jumps between positions for packed sequences.
        attention_mask=pad_sequence([torch.ones(size) for size in sizes], batch_first=True),
    ).logits
    return [(logits[b, size - 1], size) for b, size in enumerate(sizes)]


@torch.no_grad()
def log_probs_from_scratch(
    backbone: Backbone,
    module: MergeModule,
    matcher: Matcher,
    ids: NDArray[np.int64],
    unit_positions: UnitPositions = "compact",
) -> Tensor:
    """Log-probability of every token behind the first, from what is before it alone."""
    prompts: list[Prompt] = [(matcher, [ids[:target].tolist()]) for target in range(1, len(ids))]
    if not prompts:
        return torch.zeros(0, dtype=torch.float64)
    rows = from_scratch(backbone, module, prompts, unit_positions)
    logits = torch.stack([row for row, _ in rows])
    return logits.double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
