"""The sides of the engine benchmark: backbones with their rules and text, and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.timing import spread, timed
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.model_files import DTYPES
from umim_core.backbone.shape import BackboneShape
from umim_core.config.rule_options import RuleOptions
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward
from umim_core.inference.prompts import read_prompts
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import fill_units
from umim_core.merging.span_cache import SpanCache
from umim_core.mining.counting import count_ngrams
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import Matcher
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.text.sources import JsonLines
from umim_core.text.tokens import first_ids
from umim_core.throughput.break_even import ThroughputRow
from umim_core.throughput.roofline import synchronize

OURS, DYNAMIC, STATIC = "ours", "transformers, dynamic cache", "transformers, static cache"
RANDOM: Final = "random-llama"
BACKBONES: Final = (RANDOM, "umim-docs-llama", "umim-docs-gpt2")
CHECKPOINT: Final = "umim-smollm2-135m"
GENERAL: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "general"
PASSAGE: Final = 64  # tokens
Ids = NDArray[np.int64]
Side = Callable[[], list[list[int]]]
_CACHES: Final = {DYNAMIC: "dynamic", STATIC: "static"}
_PHRASES: Final = 4_000
_TAU: Final = 5
_MINED: Final = 400_000  # tokens that the rules of the random backbone are mined on
_SEGMENT: Final = 512


@dataclass(frozen=True)
class Subject:
    """Model, rules and text to time.

    Attributes:
        merged_model: The model with its natural rules.
        ids: Text that the rules were not mined on [T].
        text: What text this is; empty for that of the small backbones.
    """

    merged_model: MergedModel
    ids: Ids
    text: str = ""

    @property
    def backbone(self) -> Backbone:
        """The frozen model."""
        return self.merged_model.backbone


def subject(name: str, tokens: int, *, dtype: str, device: str) -> Subject:
    """Return a backbone with all it takes."""
    if name == RANDOM:
        return random_subject(random_config(), tokens, dtype=dtype, device=device)
    umim = UMIM.from_pretrained(name, dtype=dtype, device=device)
    if name not in BACKBONES:
        text, ids = general_text(umim, tokens)
        return Subject(umim.merged_model, ids, text)
    ids = np.array(umim.backbone.encode(held_out_text())[:tokens], dtype=np.int64)
    return Subject(umim.merged_model, ids)


def general_text(umim: UMIM, tokens: int) -> tuple[str, Ids]:
    """Return what held-out text this is, and its ids: passages of every kind of text in turn."""
    files = sorted(GENERAL.glob("*-test.jsonl.gz"))
    if not files:
        ids = np.array(umim.backbone.encode(held_out_text()), dtype=np.int64)
        return "docstrings of the installed packages, test split", ids[:tokens]
    tokenizer = umim.backbone.require_tokenizer()
    passages = -(-tokens // (PASSAGE * len(files)))
    kinds = [
        np.resize(
            first_ids(JsonLines(paths=(str(file),)), tokenizer, passages * PASSAGE)[0],
            (passages, PASSAGE),
        )
        for file in files
    ]
    names = ", ".join(file.name.removesuffix("-test.jsonl.gz") for file in files)
    ids = np.stack(kinds, axis=1).reshape(-1).astype(np.int64)
    return f"general English ({names}), test split, passages of {PASSAGE} tokens in turn", ids


def random_config() -> LlamaConfig:
    """Return the shape of a backbone of realistic proportions."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )


def llama_config(shape: BackboneShape, positions: int) -> LlamaConfig:
    """Return the configuration of a Llama of a shape, without special tokens."""
    sizes = {"hidden_size", "intermediate_size", "head_dim", "vocab_size"}
    return LlamaConfig(
        **shape.model_dump(include=sizes),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_backbone(config: LlamaConfig, *, dtype: str, device: torch.device | str) -> Backbone:
    """Return a backbone of random weights, made on its device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], trust_remote_code=False
        )
    return wrap_backbone(model, None)


def random_subject(
    config: LlamaConfig,
    tokens: int,
    *,
    dtype: str,
    device: torch.device | str,
    mined: int = _MINED,
) -> Subject:
    """Return a backbone of random weights, a fresh module, and rules mined on random phrases."""
    backbone = random_backbone(config, dtype=dtype, device=device)
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(0))
    module = module.to(backbone.device).requires_grad_(False)
    text = phrase_text(mined + tokens, config.vocab_size)
    offsets = np.arange(0, mined + 1, _SEGMENT, dtype=np.int64)
    counts = count_ngrams(text[: offsets[-1]].astype(np.int32), offsets, _TAU)
    matcher = Matcher(RuleSet.from_counts(counts, RuleOrigin(options=RuleOptions(tau=_TAU))))
    return Subject(MergedModel(backbone, module, matcher, "compact"), text[mined:])


def phrase_text(tokens: int, vocab: int) -> Ids:
    """Return text of single tokens and phrases of 2 to 4, both with frequencies of Zipf's law."""
    generator = np.random.default_rng(0)
    phrases = [generator.integers(0, vocab, size=n) for n in generator.integers(2, 5, _PHRASES)]
    parts: list[Ids] = []
    length = 0
    while length < tokens:
        if generator.random() < 0.75:
            part = (generator.zipf(1.2, 1) - 1) % vocab
        else:
            part = phrases[(int(generator.zipf(1.2)) - 1) % _PHRASES]
        parts.append(part.astype(np.int64))
        length += len(part)
    return np.concatenate(parts)[:tokens]


def generation_sides(backbone: Backbone, prompts: Ids, new_tokens: int) -> dict[str, Side]:
    """Return ours without rules and transformers with both caches; each returns the new ids.

    Prompts are raw ids [B, L].
    """
    engine = Engine(MergedModel.without_merging(backbone))
    options = GenerateOptions(max_new_tokens=new_tokens)

    def ours() -> list[list[int]]:
        return [list(row.ids) for row in engine.generate(list(prompts), options).rows]

    def theirs(cache: str) -> Side:
        return lambda: (
            _generate(backbone, prompts, new_tokens, cache)
            .sequences[:, prompts.shape[1] :]
            .tolist()
        )

    return {OURS: ours} | {name: theirs(cache) for name, cache in _CACHES.items()}


def _generate(backbone: Backbone, prompts: Ids, new_tokens: int, cache: str) -> Any:
    ids = torch.tensor(prompts, device=backbone.device)
    with torch.no_grad():
        return backbone.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )


def merging_shares(
    subject: Subject, rows: Sequence[ThroughputRow], rounds: int
) -> list[dict[str, Any]]:
    """Return what matching and merging take of the prefills by natural rules."""
    shares = []
    for row in rows:
        if (row.phase, row.rules) == ("prefill", "natural"):
            prompts = subject.ids[: row.batch_size * row.prompt_tokens]
            seconds = merging_seconds(subject, prompts.reshape(row.batch_size, -1), rounds)
            share = float(np.median(seconds)) / row.umim_seconds
            sizes = {"prompt_tokens": row.prompt_tokens, "batch_size": row.batch_size}
            shares.append(sizes | {"seconds": spread(seconds), "share": share})
    return shares


def merging_seconds(subject: Subject, prompts: Ids, rounds: int) -> list[float]:
    """Return the seconds that matching, packing, merging and embedding prompts [B, L] take.

    At a merge depth above 0 the module merges states of the same shape, and nothing is embedded.
    """
    merged_model, backbone = subject.merged_model, subject.backbone
    spans = SpanCache(merged_model)
    ids = torch.tensor(prompts, device=backbone.device)
    states = backbone.embed(ids)  # of the shape of the states before the merge depth

    @torch.no_grad()
    def run() -> object:
        packed = read_prompts(list(prompts), None, merged_model).packed
        if merged_model.merge_depth:
            units = merged_model.unit_states(packed, ids, states)
        else:
            pooled = spans.merge(packed.span_ids, packed.span_lengths)
            units = fill_units(packed, backbone, pooled)
        synchronize(backbone.device)
        return units

    run()
    return [timed(run)[0] for _ in range(rounds)]


def logits_error(subject: Subject, prompts: Ids, new_tokens: int) -> float:
    """Return the largest difference of any logit from transformers', under an empty rule set.

    It is infinite where the ids differ. Prompts are raw ids [B, L].
    """
    seen: list[torch.Tensor] = []

    def keep(forward: Forward) -> None:
        seen.append(forward.logits.clone())

    empty = Matcher(RuleSet.from_spans([]))
    ours = Engine(subject.merged_model.merging_by(empty)).generate(
        list(prompts), GenerateOptions(max_new_tokens=new_tokens, observer=keep)
    )
    theirs = _generate(subject.backbone, prompts, new_tokens, "dynamic")
    same = [list(row.ids) for row in ours.rows] == theirs.sequences[:, prompts.shape[1] :].tolist()
    if not same:
        return float("inf")
    pairs = zip(seen, theirs.logits, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
