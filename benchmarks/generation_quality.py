"""Texts of the base model against texts of UMIM: repetition, diversity, perplexity, cache.

    python -m benchmarks.generation_quality --out docs/results/generation_quality.json
    python -m benchmarks.generation_quality --checkpoint DIR --name NAME --text test.txt

Prompts are the first 100 tokens of held-out documents: docstrings for the embedded checkpoints, the
lines of a text file for a named one. Up to 100 tokens follow; an end-of-sequence token ends a text.
Every decoding runs without merging (the base model), with merged prompts, with merged prompts and
generated tokens, and with the latter where tokens were likely (``decode_min_probability``) or by
cheap rules (``decode_max_damage``, nats per saved token; only where the rules carry prices). Span
eviction merges nothing: columns of spans leave the cache when they are some tokens old.
Sampling is repeated with several seeds. Greedy decoding draws nothing, so it is one run. The
perplexity is that of the generated tokens under the base model, given the prompt. With ``--commit``
the same call goes on behind the rows that were finished, and one with other bounds adds theirs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from benchmarks.common import Benchmark, Report, go_on, save
from benchmarks.corpus import CACHE, held_out_texts
from umim_core import UMIM
from umim_core.config.form import Merge
from umim_core.embedded.assets import embedded_names
from umim_core.evaluation.generation_quality import GenerationQuality, generation_quality
from umim_core.inference.outputs import RowOutput
from umim_core.inference.request import Request
from umim_core.inference.stopping import end_ids
from umim_core.store.artifacts import digest_of, finite_or_none, sha256_bytes
from umim_core.text.tokens import tokenize_documents

PROMPT_TOKENS: Final = 100
NEW_TOKENS: Final = 100
DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final[tuple[Merge, ...]] = ("none", "prompt", "all")  # rows of the report
BOUNDS: Final = (0.3, 0.6, 0.9)  # further rows
DAMAGES: Final = (0.25, 0.5, 1.0, 2.0)  # likewise
AGES: Final = (0, 16, 64)  # likewise
_UNBOUNDED: Final[Report] = {
    "decode_min_probability": 0.0,
    "decode_max_damage": None,
    "span_eviction": None,
}
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """One model under measurement.

    Attributes:
        umim: Backbone, module and rules.
        prompts: Raw ids of the prompts [P_b] each.
        new_tokens: Most tokens to generate from each.
    """

    umim: UMIM
    prompts: list[Ids]
    new_tokens: int = NEW_TOKENS


def choose_prompts(texts: Sequence[str], umim: UMIM, count: int, length: int) -> list[Ids]:
    """Return the beginnings of documents that are spread evenly over the corpus.

    Args:
        texts: Documents; those of fewer than ``length`` tokens are left out.
        umim: Whose tokenizer cuts them.
        count: Prompts wanted.
        length: Tokens of a prompt.

    Raises:
        SystemExit: If fewer documents are long enough.
    """
    tokenizer = umim.backbone.require_tokenizer()
    long = [ids for ids in tokenize_documents(texts, tokenizer) if len(ids) >= length]
    if len(long) < count:
        raise SystemExit(f"only {len(long)} documents have {length} tokens, {count} are wanted")
    chosen = np.linspace(0, len(long) - 1, count).astype(np.int64)
    return [long[index][:length].astype(np.int64) for index in chosen]


def generate(
    umim: UMIM,
    prompts: Sequence[Ids],
    merge: Merge,
    batch_size: int,
    seed: int = 0,
    bounds: Report | None = None,
    **settings: Any,
) -> list[RowOutput]:
    """Generate from every prompt, in batches; the seed differs from batch to batch.

    Args:
        umim: The model.
        prompts: Raw ids of the prompts [P_b] each.
        merge: What is merged.
        batch_size: Prompts per batch.
        seed: Of the whole run.
        bounds: Bounds of merging and age of eviction, by their names in ``Request``.
        settings: transformers' settings.
    """
    config = GenerationConfig(**settings)
    rows: list[RowOutput] = []
    for first in range(0, len(prompts), batch_size):
        request = Request(merge=merge, seed=seed * len(prompts) + first, **(bounds or {}))
        rows += umim.engine.generate(prompts[first : first + batch_size], config, request).rows
    return rows


def run(
    subject: Subject,
    decoding: str,
    merge: Merge,
    seed: int,
    batch_size: int,
    row: Report = _UNBOUNDED,
) -> list[RowOutput]:
    """Generate in one of the decodings; an end-of-sequence token ends a text.

    Without a bound on damage in the row all rules merge, whatever the checkpoint's own bound is.
    """
    bounds = {name: row[name] for name in _UNBOUNDED}
    if bounds["decode_max_damage"] is None:
        bounds["decode_max_damage"] = math.inf
    settings = {
        "max_new_tokens": subject.new_tokens,
        "eos_token_id": end_ids(subject.umim.backbone) or None,
        **DECODINGS[decoding],
    }
    return generate(subject.umim, subject.prompts, merge, batch_size, seed, bounds, **settings)


def over_seeds(runs: Sequence[GenerationQuality]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of every figure; no deviation of one run."""
    metrics = [found.metrics() for found in runs]
    summary = {}
    for name in metrics[0]:
        values = [found[name] for found in metrics]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        summary[name] = {
            "mean": finite_or_none(float(np.mean(values))),
            "std": finite_or_none(deviation),
        }
    return summary


def new_rows(
    done: Sequence[Report],
    probabilities: Sequence[float],
    damages: Sequence[float],
    ages: Sequence[int],
) -> Iterator[Report]:
    """Yield decoding, merging, bounds and age of eviction of every row that is not done."""
    ways: list[Report] = [
        *({"merge": merge} for merge in MERGES),
        *({"merge": "all", "decode_min_probability": least} for least in probabilities),
        *({"merge": "all", "decode_max_damage": most} for most in damages),
        *({"merge": "none", "span_eviction": age} for age in ages),
    ]
    known = [_UNBOUNDED | old for old in done]
    for decoding in DECODINGS:
        for way in ways:
            row = {"decoding": decoding} | _UNBOUNDED | way
            if not any(old | row == old for old in known):
                yield row


def measure(subject: Subject, row: Report, seeds: int, batch_size: int) -> Report:
    """Measure one decoding with one way of merging."""
    runs = [
        generation_quality(
            run(subject, row["decoding"], row["merge"], seed, batch_size, row),
            subject.umim.backbone,
        )
        for seed in range(seeds if DECODINGS[row["decoding"]]["do_sample"] else 1)
    ]
    return row | {"runs": len(runs), "metrics": over_seeds(runs)}


def run_all(options: argparse.Namespace, report: Report) -> None:
    """Measure the embedded checkpoints, then the named one; every row is written at once."""
    if (options.checkpoint is None) != (options.text is None):
        raise SystemExit("--checkpoint and --text go together")
    names = ("prompt_tokens", "new_tokens", "seeds", "batch_size")
    report |= {name: getattr(options, name) for name in names} | {"subjects": {}}
    go_on(report, options.out, names, ["subjects"])

    def add(name: str, umim: UMIM, texts: Sequence[str]) -> None:
        prompts = choose_prompts(texts, umim, options.prompts, options.prompt_tokens)
        subject = Subject(umim, prompts, options.new_tokens)
        found = {
            "prompts": len(prompts),
            "prompts_digest": digest_of({"ids": [prompt.tolist() for prompt in prompts]}),
            "backbone_fingerprint": umim.backbone.fingerprint,
            "module_digest": umim.module.digest(),
            "rules_digest": umim.rules.digest,
        }
        earlier = report["subjects"].get(name, {})
        rows = earlier["rows"] if earlier | found == earlier else []
        prices = umim.rules.prices
        if prices is not None:  # no digest of the rules depends on them
            digest = sha256_bytes(prices.tobytes())
            found["prices_digest"] = digest
            if earlier.get("prices_digest", digest) != digest:
                rows = [row for row in rows if row.get("decode_max_damage") is None]
        report["subjects"][name] = found | {"rows": rows}
        damages = [] if prices is None else options.max_damage
        for row in new_rows(list(rows), options.min_probability, damages, options.span_eviction):
            rows.append(measure(subject, row, options.seeds, options.batch_size))
            save(report, options.out)

    docstrings = held_out_texts(options.cache) if options.embedded else []
    for name in options.embedded:
        add(name, UMIM.from_pretrained(name), docstrings)
    if options.checkpoint is not None:
        umim = UMIM.from_pretrained(options.checkpoint, backbone=options.backbone)
        lines = options.text.read_text(encoding="utf-8").splitlines()
        add(options.name or Path(options.checkpoint).resolve().name, umim, lines)


main = Benchmark(
    name="generation_quality",
    doc=__doc__,
    options={
        "embedded": {"nargs": "*", "default": embedded_names()},
        "checkpoint": str,
        "backbone": str,
        "text": Path,
        "name": str,
        "prompts": 64,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seeds": 5,
        "min_probability": {"nargs": "*", "type": float, "default": list(BOUNDS)},
        "max_damage": {"nargs": "*", "type": float, "default": list(DAMAGES)},
        "span_eviction": {"nargs": "*", "type": int, "default": list(AGES)},
        "batch_size": 32,
        "cache": CACHE,
    },
    measure=run_all,
).main


if __name__ == "__main__":
    sys.exit(main())
