"""Texts of the base model against texts of UMIM: repetition, diversity, perplexity, cache.

    python -m benchmarks.generation_quality --out docs/results/generation_quality.json
    python -m benchmarks.generation_quality --checkpoint DIR --name NAME --text test.txt

Prompts are the first 100 tokens of held-out documents: docstrings for the embedded checkpoints, the
lines of a text file for a named one. Up to 100 tokens follow; an end-of-sequence token ends a text.
Every decoding runs without merging (the base model), with merged prompts, and with merged prompts
and generated tokens. Sampling is repeated with several seeds. Greedy decoding draws nothing, so it
is one run. The perplexity is that of the generated tokens under the base model, given the prompt.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from benchmarks.common import Report, add_report_options, close, facts, save
from benchmarks.corpus import CACHE, held_out_texts
from umim_core import UMIM
from umim_core.embedded.assets import embedded_names
from umim_core.evaluation.generation_quality import GenerationQuality, generation_quality
from umim_core.inference.outputs import RowOutput
from umim_core.inference.stopping import end_ids
from umim_core.store.artifacts import finite_or_none
from umim_core.text.tokens import tokenize_documents

PROMPT_TOKENS: Final = 100
NEW_TOKENS: Final = 100
DECODINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"do_sample": False},
    "top-p 0.9, temperature 0.8": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "plain sampling": {"do_sample": True, "top_p": 1.0, "temperature": 1.0},
}
MERGES: Final = {"none": (False, False), "prompt": (True, False), "all": (True, True)}
LIBRARIES: Final = ("numpy", "torch", "transformers")
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


def run(subject: Subject, decoding: str, merge: str, seed: int, batch_size: int) -> list[RowOutput]:
    """Generate from every prompt, in batches; the seed differs from batch to batch."""
    umim = subject.umim
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' own
        max_new_tokens=subject.new_tokens,
        eos_token_id=end_ids(umim.backbone) or None,
        **DECODINGS[decoding],
    )
    prompt, decode = MERGES[merge]
    rows: list[RowOutput] = []
    for first in range(0, len(subject.prompts), batch_size):
        output = umim.engine.generate(
            subject.prompts[first : first + batch_size],
            config,
            merge_prompt=prompt,
            merge_decode=decode,
            seed=seed * len(subject.prompts) + first,
        )
        rows += output.rows
    return rows


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


def measure(subject: Subject, seeds: int, batch_size: int) -> Report:
    """Measure every decoding with every way of merging."""
    rows = []
    for decoding, sampling in DECODINGS.items():
        for merge in MERGES:
            repeats = range(seeds if sampling["do_sample"] else 1)
            runs = [
                generation_quality(
                    run(subject, decoding, merge, seed, batch_size), subject.umim.backbone
                )
                for seed in repeats
            ]
            row = {"decoding": decoding, "merge": merge, "runs": len(runs)}
            rows.append({**row, "metrics": over_seeds(runs)})
    return {"prompts": len(subject.prompts), "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedded", nargs="*", default=embedded_names(), help="measured as well")
    parser.add_argument("--checkpoint", help="directory of one more checkpoint; needs --text")
    parser.add_argument("--backbone", help="its backbone, if not where the checkpoint names it")
    parser.add_argument("--text", type=Path, help="its held-out text (UTF-8), a document per line")
    parser.add_argument("--name", help="what the results call it; the directory's name if absent")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind of sampling")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the docstrings")
    add_report_options(parser)
    options = parser.parse_args(arguments)
    if (options.checkpoint is None) != (options.text is None):
        parser.error("--checkpoint and --text go together")

    report: Report = {
        "benchmark": "generation_quality",
        "facts": facts(LIBRARIES, options.commit),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "seeds": options.seeds,
        "subjects": {},
    }

    def add(name: str, umim: UMIM, texts: Sequence[str]) -> None:
        prompts = choose_prompts(texts, umim, options.prompts, options.prompt_tokens)
        subject = Subject(umim, prompts, options.new_tokens)
        report["subjects"][name] = measure(subject, options.seeds, options.batch_size)
        save(report, options.out)

    if options.embedded:
        docstrings = held_out_texts(options.cache)
        for name in options.embedded:
            add(name, UMIM.from_pretrained(name), docstrings)
    if options.checkpoint is not None:
        umim = UMIM.from_pretrained(options.checkpoint, backbone=options.backbone)
        lines = options.text.read_text(encoding="utf-8").splitlines()
        add(options.name or Path(options.checkpoint).resolve().name, umim, lines)
    return close(report, options.out)


if __name__ == "__main__":
    sys.exit(main())
