"""Texts of the base model against texts of UMIM: quality, similarity to held-out text, cache.

    python -m benchmarks.generation_quality --out docs/results/generation_quality.json
    python -m benchmarks.generation_quality --checkpoints NAME=DIR --text test.txt
    python -m benchmarks.generation_quality --checkpoints NAME=PRICED --decode-tr 0.04 0.08 0.16
    python -m benchmarks.generation_quality --features MODEL --out similarity.json

Prompts are the first 100 tokens of held-out documents that have 200 or more: docstrings, or the
lines of a text file. Up to 100 tokens follow; an end-of-sequence token ends a text. Every decoding
runs without merging (the base model), with merged prompts, with merged prompts and generated
tokens, and with the latter by cheap rules (``decode_max_damage``, nats per saved token, for rules
with prices: ``umim prune CHECKPOINT TEXTS --keep-all``). ``--decode-tr`` takes the bounds under
which the rules save so much of the held-out documents. Span eviction merges nothing: columns of
spans leave the cache when they are some tokens old. ``--methods`` adds baselines, whose prompts or
caches lose as many tokens as the rules save of each prompt.
Sampling is repeated with several seeds. Greedy decoding draws nothing, so it is one run. The
perplexity is that of the generated tokens under the base model, given the prompt. Every text is
compared with as many tokens as follow the prompt in its document: ROUGE, chrF, and with stand-in
features BERTScore and MAUVE (hidden states of the checkpoint's backbone, or of ``--features``).
With ``--commit`` the same call goes on behind the rows that were finished, and one with other
bounds adds theirs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import Benchmark, Report, go_on, named, save
from benchmarks.corpus import CACHE, held_out_texts
from benchmarks.generation_quality.damage_bounds import damage_bounds
from benchmarks.generation_quality.text_runs import (
    NEW_TOKENS,
    Subject,
    choose_prompts,
    differences,
    measure,
    new_rows,
)
from umim_core import UMIM
from umim_core.baselines.methods import BASELINES
from umim_core.embedded.assets import embedded_names
from umim_core.evaluation.text_metrics.mauve import mauve_buckets
from umim_core.evaluation.text_metrics.reference_similarity import References, require_libraries
from umim_core.evaluation.text_metrics.text_features import TextFeatures, features_of
from umim_core.store.artifacts import digest_of, sha256_bytes

PROMPT_TOKENS: Final = 100
AGES: Final = (0, 16, 64)  # further rows


def run_all(options: argparse.Namespace, report: Report) -> None:
    """Measure every checkpoint; every row is written at once.

    Raises:
        MissingExtraError: If a library that compares texts is not installed.
        ConfigError: If a baseline is unknown.
        RuleSetError: If there are bounds on damage and a checkpoint's rules have no prices.
    """
    for method in options.methods:
        BASELINES.find(method)
    require_libraries(options.prompts)  # before minutes of generating
    features = None if options.features is None else features_of(options.features)
    names = ("prompt_tokens", "new_tokens", "seeds", "batch_size")
    report["name"] = options.out.stem if options.out else "generation_quality"
    report |= {name: getattr(options, name) for name in names}
    report |= {"features": features and features.model, "subjects": {}}
    go_on(report, options.out, [*names, "features"], ["subjects"])
    models = {
        name: UMIM.from_pretrained(where, backbone=options.backbone, dtype="float32")
        for name, where in named(options.checkpoints).items()
    }
    if options.max_damage or options.decode_tr:
        for umim in models.values():
            umim.rules.require_prices()
    if options.text is None:
        texts = held_out_texts(options.cache)
    else:
        texts = options.text.read_text(encoding="utf-8").splitlines()
    for name, umim in models.items():
        add(name, umim, features or TextFeatures(umim.backbone), texts, options, report)


def add(
    name: str,
    umim: UMIM,
    features: TextFeatures,
    texts: Sequence[str],
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Measure the missing rows of one checkpoint."""
    length = options.prompt_tokens + options.new_tokens
    beginnings = choose_prompts(texts, umim, options.prompts, length)
    prompts, rest = zip(
        *(np.split(ids, [options.prompt_tokens]) for ids in beginnings), strict=True
    )
    continuations = tuple(umim.backbone.decode(ids.tolist()) for ids in rest)
    subject = Subject(umim, list(prompts), options.new_tokens, References(continuations, features))
    found = {
        "prompts": len(prompts),
        "prompts_digest": digest_of({"ids": [prompt.tolist() for prompt in prompts]}),
        "backbone_fingerprint": umim.backbone.fingerprint,
        "module_digest": umim.module.digest(),
        "rules_digest": umim.rules.digest,
        "features": features.label,
        "features_fingerprint": features.backbone.fingerprint,
        "references_digest": digest_of({"texts": continuations}),
        "mauve_buckets": mauve_buckets(len(prompts)),
    }
    earlier = report["subjects"].get(name, {})
    earlier = earlier if earlier | found == earlier else {}
    rows = earlier.get("rows", [])
    prices = umim.rules.prices
    if prices is not None:  # no digest of the rules depends on them
        digest = sha256_bytes(prices.tobytes())
        found["prices_digest"] = digest
        if earlier.get("prices_digest", digest) != digest:
            rows = [row for row in rows if row.get("decode_max_damage") is None]
    report["subjects"][name] = earlier | found | {"rows": rows}
    bounds = damage_bounds(umim, texts, options.max_damage, options.decode_tr)
    asked = (list(bounds), options.span_eviction, options.methods)
    for row in new_rows(list(rows), *asked):
        measured = measure(subject, row, options.seeds, options.batch_size)
        if row["decode_max_damage"] is not None:
            measured["text_token_reduction"] = bounds[row["decode_max_damage"]]
        rows.append(measured | {"differences": differences(measured, rows)})
        save(report, options.out)


main = Benchmark(
    name="generation_quality",
    doc=__doc__,
    options={
        "checkpoints": {"nargs": "+", "default": embedded_names(), "metavar": "[NAME=]PATH"},
        "backbone": str,
        "features": str,
        "text": Path,
        "prompts": 64,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seeds": 5,
        "max_damage": {"nargs": "*", "type": float, "default": []},
        "decode_tr": {"nargs": "*", "type": float, "default": []},
        "span_eviction": {"nargs": "*", "type": int, "default": list(AGES)},
        "methods": {"nargs": "*", "default": [], "metavar": "BASELINE"},
        "batch_size": 32,
        "cache": CACHE,
    },
    measure=run_all,
).main


if __name__ == "__main__":
    sys.exit(main())
