"""Merging on a GPU, in six minutes: exactness, speed against bounds, a fixed KV pool.

    python -m benchmarks.gpu --out docs/results/gpu.json
    python -m benchmarks.gpu --tiny      the same code on the processor, in seconds

Weights are random and made on the device; nothing is loaded. The parts, in order::

    exactness      each step of the engine against a forward from scratch: rows that roll back, in
                   batches, merged at the input or inside with adapters, in both data types
    prefill        Llama-3.1-8B's shape: speed-up by given token reductions against its bound, and
                   by natural rules, of which matching and merging take a share
    decode         the same while decoding, and the bytes that it reads against those of a copy
    pool           how many requests a fixed pool of keys and values holds, and how fast they are
    distillation   the loss with its head, and a step of Llama-3.2-1B's shape, against their bounds

A part has until so many seconds and measures one setting after the other, the smallest first; one
that it has probably no time for is left out by name. Results are written after each setting. A
figure above a ceiling of the device, or another error of a setting, fails the run; the others are
measured all the same. Gates: P3 and P4 of docs/performance.md, of an H200; a loss or a step that is
left out is a gate missed.

The engine launches its kernels one by one. CUDA graphs replay fixed shapes and addresses, and here
the view of the cache grows with every token: there are none, and launches bound decoding few rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from benchmarks.engine import merging_share
from benchmarks.runner import Benchmark, Gates, Report, alternate, device_name, save, spread
from benchmarks.subjects import Ids, Subject, random_backbone, random_subject
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.backbone.trials import state_difference, state_tolerance
from umim_core.checkpoint.checkpoint import fresh_module
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.config.form import ModuleForm
from umim_core.errors import ConfigError, UmimError, require
from umim_core.inference.batch import Batch
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward
from umim_core.inference.prefix_store import PrefixStore
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.break_even import Phase, ThroughputRow
from umim_core.throughput.roofline import ForwardCost, Roofline, measure_bandwidth, measure_peak
from umim_core.throughput.throughput import EVERYWHERE, FixedSpans, measure_throughput, peak_bytes
from umim_core.training.loss import DEFAULT_CHUNK, distill_loss
from umim_core.training.step import DistillModel, step_memory

OURS, PLAIN, LIGER = "ours", "plain", "Liger"
HAS_LIGER: Final = importlib.util.find_spec("liger_kernel") is not None
LIMIT: Final = 360.0  # seconds of a run
UNTIL: Final = {  # seconds that a part may last to, from the beginning of the run
    "exactness": 36.0,
    "prefill": 187.0,  # with the making of the model
    "decode": 259.0,
    "pool": 331.0,
    "distillation": LIMIT,
}
GROWTH: Final = 2.5  # times that a setting takes of the one before it, at most
MERGED: Final = 0.4  # token reduction of the pool's requests, and of distillation's rows
OVER_BOUND, OVER_LIGER, EXTRA_BYTES, MFU = 1.35, 1.3, 2e9, 0.45  # of distillation
ROUNDED: Final = 5e-2  # the plain side of the loss rounds its logits to bfloat16
FORMS: Final = {
    "at the input": ModuleForm(),
    "inside, adapters": ModuleForm(
        residual="last", unit_positions="preserved", merge_depth=1, adapter_rank=8
    ),
}
LLAMA_1B: Final = partial(
    LlamaConfig, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LLAMA_8B: Final = partial(
    LLAMA_1B, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, head_dim=128,
    tie_word_embeddings=False,
)  # fmt: skip
_FEW_LAYERS: Final = partial(LLAMA_1B, num_hidden_layers=4, vocab_size=64)
_SMALL: Final = partial(
    _FEW_LAYERS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
Config = Callable[..., LlamaConfig]  # of max_position_embeddings
Result = tuple[float, Tensor]  # mean loss, gradient
Side = Callable[[], Result]


@dataclass(frozen=True)
class Shape:
    """Aligned rows R, hidden size d and vocabulary V of a loss."""

    rows: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class Sizes:
    """What is measured: models, the loss, tokens of prompts, rows, bytes."""

    exact: Config = _FEW_LAYERS
    engine: Config = LLAMA_8B
    step: Config = LLAMA_1B
    head: Shape = Shape(8192, 4096, 128_256)  # of Llama-3.1-8B
    prefill: tuple[int, ...] = (1024, 4096, 16_384, 32_768)
    reductions: tuple[float, ...] = (0.2, 0.4, 0.6)
    decode: tuple[int, ...] = (1, 16, 64)  # rows behind prompts of prefill[0]
    new: int = 16
    pool: int = 16 << 30
    requests: tuple[int, ...] = (8192, 32_768)
    step_rows: int = 16
    step_length: int = 1024
    pairs: int = 3
    mined: int = 400_000  # tokens that the natural rules are mined on


TINY: Final = Sizes(
    exact=_SMALL,
    engine=_SMALL,
    step=_SMALL,
    head=Shape(64, 32, 256),
    prefill=(16, 48),
    decode=(1, 3),
    new=4,
    pool=40_000,
    requests=(32, 96),
    step_rows=2,
    step_length=32,
    pairs=1,
    mined=4_000,
)


@dataclass
class Run:
    """A run under way: measures its parts within their time, and writes what it has."""

    report: Report
    out: Path | None
    tiny: bool = False  # without limits
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.report |= {"left_out": [], "failed": []}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def part(
        self, name: str, settings: Iterable[tuple[Any, ...]], measure: Callable[..., list[Report]]
    ) -> None:
        """Measure the settings of a part that there is time for; each gives rows."""
        rows = self.report[name] = list[Report]()
        until, took = math.inf if self.tiny else UNTIL[name], 0.0
        for setting in settings:
            label, start = " ".join(map(str, (name, *setting))), self.seconds
            if start + GROWTH * took > until:
                self.report["left_out"].append(label)
                continue
            try:
                rows += measure(*setting)
            except (UmimError, RuntimeError) as error:  # torch's are, without memory too
                self.report["failed"].append({"setting": label, "error": str(error)})
            took = self.seconds - start
            self.report["seconds"] = self.seconds
            save(self.report, self.out)


def exactness(
    config: LlamaConfig, device: torch.device, dtype: str, merged: str, rows: int
) -> list[Report]:
    """Compare every step of rows that merge wherever they can with a forward from scratch."""
    backbone = random_backbone(config, dtype=dtype, device=device)
    rules = RuleSet.from_spans(product(range(config.vocab_size), repeat=2))
    module = fresh_module(backbone, rules, FORMS[merged], seed=0).requires_grad_(False)
    if module.adapters is not None:  # and a residual, whose norm begins at zero
        for weight in (module.norm_o.weight, *module.adapters.up.values()):
            weight.normal_(0.0, 0.3)
    model, rng = MergedModel(backbone, module, Matcher(rules)), np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n) for n in rng.integers(8, 65, rows)]
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
    """The parts of one model, its device's ceilings of FLOP/s and of bytes moved a second."""

    sizes: Sizes
    subject: Subject
    flops: Roofline
    bandwidth: Roofline

    @property
    def cost(self) -> ForwardCost:
        return ForwardCost.of(self.subject.merged_model)

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
        """Time prefills; of that by natural rules, what matching, packing and merging take."""
        rows = self.rows("prefill", 1, length, self.sizes.reductions)
        natural = merging_share(self.subject, rows[-1], self.sizes.pairs)
        return [*map(asdict, rows[:-1]), asdict(rows[-1]) | {"merging": natural["share"]}]

    def decode(self, batch_size: int) -> list[Report]:
        """Time decoding; a step reads all weights, and the columns of all rows."""
        (row,) = self.rows("decode", batch_size, self.sizes.prefill[0], ())
        figures, steps = asdict(row), self.sizes.new - 1
        for side in ("base", "umim"):
            read = steps * (self.cost.step_bytes(0, 1) + figures[f"{side}_kv_bytes"])
            rate = self.bandwidth.check(f"{side} decode", read, figures[f"{side}_seconds"])
            figures[f"{side}_of_copy"] = rate / self.bandwidth.peak
        return [figures]

    def requests(self, length: int, side: str) -> tuple[MergedModel, int, int]:
        """Return a side's model, its units of a prompt, and how many requests the pool holds."""
        model = self.subject.merged_model
        model = model.merging_by(FixedSpans(MERGED)) if side == "merged" else model.base()
        units = len(model.segment_prompt(self.subject.ids[:length])[0])
        columns = units + self.sizes.new - 1
        return model, units, int(self.sizes.pool // self.cost.kv_bytes(columns))

    def pool_settings(self) -> Iterable[tuple[int, int, str]]:
        """Yield one request alone, then as many as the pool holds raw, and as it holds merged."""
        for length in self.sizes.requests:
            counts = {1, *(self.requests(length, side)[2] for side in ("raw", "merged"))}
            yield from product([length], sorted(counts), ["raw", "merged"])

    def pool(self, length: int, requests: int, side: str) -> list[Report]:
        """Answer requests that arrive together; what the pool has no room for waits."""
        model, units, fits = self.requests(length, side)
        device, new, ids = self.subject.backbone.device, self.sizes.new, self.subject.ids
        prompts = [np.take(ids, n + np.arange(length), mode="wrap") for n in range(requests)]
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds, first = answer(Engine(model), prompts, new, fits)
        reading = self.cost.prefill_flops(units, units)
        work = reading + (new - 1) * self.cost.decode_flops(units)
        self.flops.check(f"{side} requests", requests * work, seconds)
        return [
            {
                "prompt_tokens": length,
                "requests": requests,
                "side": side,
                "fits": fits,
                "seconds": seconds,
                "tokens_per_s": requests * (length + new) / seconds,
                "first_token": spread(first),
                "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
            }
        ]


def answer(engine: Engine, prompts: list[Ids], new: int, most: int) -> tuple[float, list[float]]:
    """Generate for all prompts, so many at once; return all seconds and those to first tokens."""
    batch, options = Batch(engine, PrefixStore(0)), replace(EVERYWHERE, max_new_tokens=new)
    waiting, first, began = prompts[::-1], list[float](), time.perf_counter()
    while waiting or batch.rows:
        if waiting and len(batch.rows) < most:  # one between two steps, as in the server
            batch.join([waiting.pop()], options)
        begun = [row for row in batch.step() if row.generated == 1]
        first += [time.perf_counter() - began] * len(begun)
    return time.perf_counter() - began, first


def loss_sides(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Side]:
    """Return every side's mean KL(teacher || student) and its gradient by the student [R, d]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = (normal(shape.vocab, shape.hidden) * (2.0 * shape.hidden**-0.5)).to(dtype)
    states = normal(shape.rows, shape.hidden)
    student = (states + 0.3 * normal(shape.rows, shape.hidden)).to(dtype)
    teacher = states.to(dtype)

    def side(mean: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Side:
        """Return the loss to show, and the gradient of the loss to train by."""

        def run() -> Result:
            leaf = student.clone().requires_grad_()
            shown, loss = mean(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
            return float(shown.detach()), gradient

        return run

    def ours(leaf: Tensor) -> tuple[Tensor, Tensor]:
        head = cast(Backbone, SimpleNamespace(head_weight=weight, head_bias=None))
        loss = distill_loss(leaf, teacher, head)
        return loss.kl / shape.rows, loss.total / shape.rows

    def plain(leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Hold all logits of both, as one writes it first."""
        own, wanted = (F.linear(s, weight).float().log_softmax(-1) for s in (leaf, teacher))
        loss = F.kl_div(own, wanted, reduction="sum", log_target=True) / shape.rows
        return loss, loss

    def liger(leaf: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

        labels = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        head = (leaf, weight, teacher, weight, labels, None, None)
        on_gpu = device.type != "cpu"  # there it is compiled, as its authors mean it
        options = (0.0, 1.0, 0.0, -100, 1.0, on_gpu, DEFAULT_CHUNK["gpu" if on_gpu else "cpu"])
        loss = LigerFusedLinearJSDFunction.apply(*head, *options)
        return loss, loss

    found = {OURS: side(ours), PLAIN: side(plain)}
    return found | ({LIGER: side(liger)} if HAS_LIGER else {})


@dataclass(frozen=True)
class StepBatch:
    """Rows, cut into units, and what trains on them."""

    model: DistillModel
    rows: list[Ids]
    cuts: list[Segmentation]

    def step(self) -> Result:
        """Return the mean KL of a step and the gradient of the module's weights."""
        loss = self.model(self.rows, self.cuts)
        parameters = list(self.model.module.parameters())
        gradients = torch.autograd.grad(loss.total / loss.weight, parameters)
        return float(loss.kl) / loss.weight, torch.cat([part.flatten() for part in gradients])

    def flops(self) -> float:
        """Return the work of a step's products, those of the merge module left out: they are few.

        A teacher forward, the student's and its gradient by the inputs, causal attention, and three
        products with the head.
        """
        shape = BackboneShape.of_model(self.model.backbone.model)
        raw = sum(map(len, self.rows))
        units = sum(len(starts) for starts, _ in self.cuts)
        # The student's rows are shorter.
        per_unit = 2.0 * shape.layers * shape.query_width * len(self.rows[0])
        attention = per_unit * raw + 3.0 * per_unit * units**2 / raw
        products = shape.block_weights * (2.0 * raw + 4.0 * units)
        return products + attention + 6.0 * units * shape.head_weights


def random_batch(sizes: Sizes, device: torch.device) -> StepBatch:
    config = sizes.step()
    backbone = random_backbone(config, dtype="bfloat16", device=device)
    size = sizes.step_rows, sizes.step_length
    rows = np.random.default_rng(0).integers(0, config.vocab_size, size)
    matcher = FixedSpans(MERGED)
    module = fresh_module(backbone, matcher.rules, ModuleForm(), seed=0)
    model = DistillModel(MergedModel(backbone, module, None), autocast=True)
    return StepBatch(model, list(rows), [matcher.segment(row) for row in rows])


def distillation(sizes: Sizes, device: torch.device, flops: Roofline, what: str) -> list[Report]:
    """Time a loss with its peers or a whole step; none may be faster than its products."""
    shared: Report = {"what": what}
    if what == "loss":
        head = sizes.head
        sides = loss_sides(head, device, torch.bfloat16)
        work = 6.0 * head.rows * head.hidden * head.vocab  # three products
    else:
        batch = random_batch(sizes, device)
        sides, work = {OURS: batch.step}, batch.flops()
        shape = BackboneShape.of_model(batch.model.backbone.model)
        cut = {"rows": sizes.step_rows, "segment_length": sizes.step_length}
        bounds = step_memory(shape, ModuleForm(), **cut, bf16=True, strategy="ddp", gpus=1)
        shared["bound_bytes"] = bounds["activations, loss"]
    results: dict[str, Result] = {}
    seconds = alternate(sides, sizes.pairs, warmed=results.__setitem__)
    loss, gradient = results[PLAIN if what == "loss" else OURS]
    rows = []
    for name, (other_loss, other) in results.items():
        taken = spread(seconds[name])
        rate = flops.check(f"{what}, {name}", work, taken["median"])
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        figures = {
            "side": name,
            "seconds": taken,
            "loss_error": abs(other_loss - loss) / abs(loss),
            "gradient_error": float(
                (other.float() - gradient.float()).norm() / gradient.float().norm()
            ),
            "of_peak": rate / flops.peak,
            "bytes": (peak_bytes(sides[name], device) or 0) - held,
        }
        rows.append(shared | figures)
    return rows


def measure(options: argparse.Namespace, report: Report) -> None:
    sizes = TINY if options.tiny else Sizes()
    rule, remedy = "torch must see a GPU", "Use --tiny, which runs on the processor."
    require(options.tiny or torch.cuda.is_available(), ConfigError, rule, "none", remedy)
    device = torch.device("cpu" if options.tiny else "cuda")
    run = Run(report, options.out, options.tiny)
    peaks = [measure_peak(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
    flops, bandwidth = max(peaks, key=lambda roof: roof.peak), measure_bandwidth(device)
    report["facts"]["device"] = device_name(device)
    report |= {"tiny": options.tiny, "new_tokens": sizes.new, "pool_bytes": sizes.pool}
    report |= {"peak_flops": flops.peak, "copied_bytes": bandwidth.peak}
    exact = product(("float32", "bfloat16"), FORMS, (1, 4))
    run.part("exactness", exact, partial(exactness, sizes.exact(), device))
    longest = max(*sizes.prefill, *sizes.requests)
    tokens = 2 * max(longest, sizes.prefill[0] * max(sizes.decode))
    config = sizes.engine(max_position_embeddings=2 * longest)
    made = random_subject(config, tokens, dtype="bfloat16", device=device, mined=sizes.mined)
    parts = EngineParts(sizes, made, flops, bandwidth)
    run.part("prefill", product(sizes.prefill), parts.prefill)
    run.part("decode", product(sizes.decode), parts.decode)
    run.part("pool", parts.pool_settings(), parts.pool)
    step = partial(distillation, sizes, device, flops)
    run.part("distillation", product(["loss", "step"]), step)
    errors = [gate[2] for name, gate in gates(report).items() if name.endswith("error")]
    report["equal"] = all(errors)


def gates(report: Report) -> Gates:
    found = Gates()
    found.at_most("failed_settings_error", len(report["failed"]), 0)
    for row in report["exactness"]:
        name = f"{row['dtype']} {row['merged']} {row['batch_size']} rows error"
        of_tolerance = row["error"] / row["tolerance"]
        found.at_most(name.replace(",", "").replace(" ", "_"), of_tolerance, 1.0)
    found.at_most("seconds", report["seconds"], LIMIT)
    if report["tiny"]:
        return found
    sides = {(row["what"], row["side"]): row for row in report["distillation"]}
    loss, step, liger = (sides.get(x) for x in (("loss", OURS), ("step", OURS), ("loss", LIGER)))
    # What was left out, or failed, would miss no gate of its own.
    found.at_least("loss_measured", loss is not None, 1.0)
    found.at_least("step_measured", step is not None, 1.0)
    if loss is not None:
        found.at_most("loss_over_bound", 1 / loss["of_peak"], OVER_BOUND)
        found.at_most("loss_extra_bytes", loss["bytes"], EXTRA_BYTES)
        found.at_most("loss_gradient_error", loss["gradient_error"] / ROUNDED, 1.0)
        if liger is not None:
            found.at_least("liger_over_ours", loss["of_peak"] / liger["of_peak"], OVER_LIGER)
    if step is not None:
        found.at_least("step_of_peak", step["of_peak"], MFU)
    return found


BENCHMARK: Final = Benchmark(
    options={"tiny": {"action": "store_true"}},
    measure=measure,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
