"""Merging on a GPU: exactness, and speed against bounds.

    python -m benchmarks.gpu --out docs/results/gpu.json
    python -m benchmarks.gpu --tiny      the same code on the processor, in seconds

Weights are random and made on the device; nothing is loaded. The parts, in order::

    exactness      each step of the engine against a forward from scratch: rows that roll back, in
                   batches, merged at the input or inside with adapters, in both data types
    prefill        Llama-3.1-8B's shape: speed-up by given token reductions against its bound, and
                   by natural rules, of which matching and merging take a share
    decode         the same while decoding

Settings are measured one after the other, the smallest first, and results are written after each. A
figure above a ceiling of the device, or another error of a setting, fails the run; the others are
measured all the same.

The engine launches its kernels one by one. CUDA graphs replay fixed shapes and addresses, and here
the view of the cache grows with every token: there are none, and launches bound decoding few rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine import merging_shares
from benchmarks.runner import (
    Benchmark,
    Gate,
    Report,
    at_most,
    device_name,
    no_error_gate_missed,
    save,
    timed,
)
from benchmarks.subjects import Ids, Subject, llama_config, random_backbone, random_subject
from umim_core.backbone.backbone import state_difference, state_tolerance
from umim_core.backbone.shape import BackboneShape
from umim_core.checkpoint.untrained import fresh_module
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.config.form import ModuleForm
from umim_core.errors import UmimError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.break_even import Phase, ThroughputRow
from umim_core.throughput.roofline import Roofline, measure_peak
from umim_core.throughput.throughput import measure_throughput

FORMS: Final = {
    "at the input": ModuleForm(),
    "inside, adapters": ModuleForm(
        residual="last", unit_positions="preserved", merge_depth=1, adapter_rank=8
    ),
}
LLAMA_8B: Final = BackboneShape(
    hidden_size=4096,
    intermediate_size=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    tied=False,
    gated_mlp=True,
)
_FEW_LAYERS: Final = LLAMA_8B.model_copy(
    update={"hidden_size": 2048, "intermediate_size": 8192, "layers": 4, "head_dim": 64}
    | {"vocab_size": 64, "tied": True}
)
_SMALL: Final = _FEW_LAYERS.model_copy(
    update={"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 4}
    | {"kv_heads": 2, "head_dim": 8}
)


@dataclass(frozen=True)
class Sizes:
    """What is measured: shapes of models, tokens of prompts, rows."""

    exact: BackboneShape = _FEW_LAYERS
    engine: BackboneShape = LLAMA_8B
    prefill: tuple[int, ...] = (1024, 4096, 16_384, 32_768)
    reductions: tuple[float, ...] = (0.2, 0.4, 0.6)
    decode: tuple[int, ...] = (1, 16, 64)  # rows behind prompts of prefill[0]
    new: int = 16
    pairs: int = 3
    mined: int = 400_000  # tokens that the natural rules are mined on


TINY: Final = Sizes(
    exact=_SMALL, engine=_SMALL, prefill=(16, 48), decode=(1, 3), new=4, pairs=1, mined=4_000
)


def measure_part(
    report: Report,
    out: Path | None,
    name: str,
    settings: Iterable[tuple[Any, ...]],
    measure: Callable[..., list[Report]],
) -> None:
    """Measure the settings of a part, each of which gives rows, and write what there is."""
    rows = report[name] = list[Report]()
    for setting in settings:
        try:
            rows += measure(*setting)
        except (UmimError, RuntimeError) as error:  # torch's are, without memory too
            label = " ".join(map(str, (name, *setting)))
            report["failed"].append({"setting": label, "error": str(error)})
        save(report, out)


def exactness(
    shape: BackboneShape, device: torch.device, dtype: str, merged: str, rows: int
) -> list[Report]:
    """Compare every step of rows that merge wherever they can with a forward from scratch."""
    backbone = random_backbone(llama_config(shape, 256), dtype=dtype, device=device)
    rules = RuleSet.from_spans(product(range(shape.vocab_size), repeat=2))
    module = fresh_module(backbone, rules, FORMS[merged], seed=0).requires_grad_(False)
    if module.adapters is not None:  # and a residual, whose norm begins at zero
        for weight in (module.norm_o.weight, *module.adapters.up.values()):
            weight.normal_(0.0, 0.3)
    model, rng = MergedModel(backbone, module, Matcher(rules)), np.random.default_rng(0)
    prompts = [rng.integers(0, shape.vocab_size, n) for n in rng.integers(8, 65, rows)]
    errors, raw_errors = list[float](), list[float]()

    def compare(forward: Forward) -> None:
        for logits, *ids in zip(forward.logits, prompts, forward.generated, strict=True):
            errors.append(state_difference(logits, from_scratch(model, *ids)))
            raw_errors.append(state_difference(logits, from_scratch(model.base(), *ids)))

    options = GenerateOptions(max_new_tokens=16, observer=compare)
    generated = Engine(model).generate(prompts, options).rows
    return [
        {
            "dtype": dtype,
            "merged": merged,
            "batch_size": rows,
            "steps": len(errors),
            "merges": sum(len(row.generated_spans) for row in generated),
            "error": max(errors),
            "tolerance": state_tolerance(backbone),
            "raw_error": min(raw_errors),
        }
    ]


@torch.no_grad()
def from_scratch(model: MergedModel, prompt: Ids, made: Sequence[int]) -> Tensor:
    """Return the logits [V] behind a prompt and generated ids, which merge apart."""
    ids = np.concatenate([prompt, np.array(made, dtype=np.int64)])
    packed = model.pack([ids], [((0, len(prompt)), (len(prompt), len(ids)))])
    tokens = torch.tensor(ids, device=model.backbone.device)[None]
    if model.merge_depth:
        raw = model.trunk.raw_states(tokens)
        states = model.states_of(tokens, raw, packed.ends, packed.lengths)
    else:
        states = model.embed(packed)
    positions = packed.position_ids(model.unit_positions)
    hidden = model.trunk.hidden(states, packed.merged, None, positions)
    return model.backbone.head(hidden[0, -1])


@dataclass(frozen=True)
class EngineParts:
    """The parts of one model, below its device's ceiling."""

    sizes: Sizes
    subject: Subject
    flops: Roofline

    def rows(
        self, phase: Phase, batch_size: int, length: int, reductions: tuple[float, ...]
    ) -> list[ThroughputRow]:
        """Time a phase at some token reductions, and by natural rules at last."""
        config = BenchmarkConfig(
            prompt_lengths=(length,),
            batch_sizes=(batch_size,),
            new_tokens=2 if phase == "prefill" else self.sizes.new,
            warmup=1,
            pairs=self.sizes.pairs,
            token_reductions=reductions,
        )
        model, ids = self.subject.merged_model, self.subject.ids
        rows = measure_throughput(model, ids, config, continuation="text", roofline=self.flops)
        return [row for row in rows if row.phase == phase]

    def prefill(self, length: int) -> list[Report]:
        """Time prefills; of that by natural rules, matching alone and with packing and merging."""
        rows = self.rows("prefill", 1, length, self.sizes.reductions)
        (merging,) = merging_shares(self.subject, rows, self.sizes.pairs)
        match = partial(self.subject.merged_model.segment_prompt, self.subject.ids[:length])
        matching = min(timed(match)[0] for _ in range(self.sizes.pairs))
        shares = {"matching": matching / rows[-1].umim_seconds, "merging": merging["share"]}
        return [*map(asdict, rows[:-1]), asdict(rows[-1]) | shares]

    def decode(self, batch_size: int) -> list[Report]:
        return [*map(asdict, self.rows("decode", batch_size, self.sizes.prefill[0], ()))]


def measure(options: argparse.Namespace, report: Report) -> None:
    sizes = TINY if options.tiny else Sizes()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("this needs a GPU, and torch sees none; --tiny runs on the processor")
    device = torch.device("cpu" if options.tiny else "cuda")
    peaks = [measure_peak(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
    flops = max(peaks, key=lambda roof: roof.peak)
    report["facts"]["device"] = device_name(device)
    report |= {"tiny": options.tiny, "peak_flops": flops.peak, "failed": []}
    part = partial(measure_part, report, options.out)
    exact = product(("float32", "bfloat16"), FORMS, (1, 4))
    part("exactness", exact, partial(exactness, sizes.exact, device))
    tokens = 2 * max(*sizes.prefill, sizes.prefill[0] * max(sizes.decode))
    config = llama_config(sizes.engine, 2 * max(sizes.prefill))
    made = random_subject(config, tokens, dtype="bfloat16", device=device, mined=sizes.mined)
    parts = EngineParts(sizes, made, flops)
    part("prefill", product(sizes.prefill), parts.prefill)
    part("decode", product(sizes.decode), parts.decode)


def gates(report: Report) -> dict[str, Gate]:
    found = {"failed_settings_error": at_most(len(report["failed"]), 0)}
    for row in report["exactness"]:
        name = f"{row['dtype']} {row['merged']} {row['batch_size']} rows error"
        of_tolerance = row["error"] / row["tolerance"]
        found[name.replace(",", "").replace(" ", "_")] = at_most(of_tolerance, 1.0)
    return found


BENCHMARK: Final = Benchmark(
    name="gpu",
    doc=__doc__,
    options={"tiny": {"action": "store_true"}},
    measure=measure,
    gates=gates,
    equal=no_error_gate_missed,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
