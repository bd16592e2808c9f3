"""Predicted memory and FLOPs of a step, against what torch itself saves and counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm
from umim_core.config.hardware import HardwareConfig
from umim_core.cost.distillation_law import MFU, predict_distillation
from umim_core.cost.prediction import Limits, Prediction
from umim_core.distill.step import DistillModel
from umim_core.errors import ResourceLimitError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule

ROWS, LENGTH, VOCAB = 3, 64, 97
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
FORMS = {
    "paper": ModuleForm(),
    "learned": ModuleForm(positions="learned"),
    "depth 3": ModuleForm(depth=3),
    "linear": ModuleForm(kind="linear"),
}
# Of units of 1, 4, 1 and 2 tokens by turns: half of the tokens are saved, spans have 3 on average.
HARDWARE = HardwareConfig(
    name="test GPU",
    gpus=2,
    gpu_memory_gib=48,
    bf16_tflops=100,
    memory_bandwidth_gbs=1000,
    expected_token_reduction=0.5,
)


def build(name: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Backbone:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention)
    return wrap_backbone(model.to(dtype), None)


def step(backbone: Backbone, form: ModuleForm) -> Tensor:
    module = MergeModule(
        backbone.hidden_size, positions=form.module_positions, depth=form.depth, kind=form.kind
    )
    module.initialise(0.02, torch.Generator().manual_seed(1))
    half = backbone.dtype is torch.bfloat16
    model = DistillModel(
        Compressed(backbone, module, None, "compact"),
        autocast=half,
        micro_batch=ROWS,
    )
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, LENGTH) for _ in range(ROWS)]
    lengths = np.tile(np.array([1, 4, 1, 2]), LENGTH // 8)
    return model(rows, [(np.cumsum(lengths) - lengths, lengths)] * ROWS).total


def predict(
    name: str,
    form: ModuleForm = FORMS["paper"],
    *,
    bf16: bool = False,
    strategy: str = "ddp",
    hardware: HardwareConfig = HARDWARE,
    micro_batch: int | None = None,
) -> Prediction:
    return predict_distillation(
        BackboneShape.of_config(CONFIGS[name]),
        form,
        rows=ROWS,
        segment_length=LENGTH,
        bf16=bf16,
        strategy="deepspeed" if strategy == "deepspeed" else "ddp",
        hardware=hardware,
        micro_batch=micro_batch,
        steps=10,
    )


def saved_bytes(backbone: Backbone, form: ModuleForm) -> int:
    """Bytes that autograd keeps during a step, the weights themselves left out."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(backbone, form)
    model = backbone.model
    frozen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    trained = (torch.nn.Parameter,)
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in kept
        if not isinstance(tensor, trained) and not isinstance(tensor._base, trained)
    }
    return sum(size for place, size in sizes.items() if place not in frozen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_activations_are_those_that_autograd_saves(name: str, form: str, bf16: bool) -> None:
    backbone = build(name, torch.bfloat16 if bf16 else torch.float32)
    memory = predict(name, FORMS[form], bf16=bf16).figures["memory"]
    assert memory["student"] + memory["spans"] == pytest.approx(
        saved_bytes(backbone, FORMS[form]), rel=0.2
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_torch_counts(name: str, form: str) -> None:
    backbone = build(name, attention="eager")  # counted as its products; the fused kernel is not
    with FlopCounterMode(display=False) as counter:
        step(backbone, FORMS[form]).backward()
    flops = predict(name, FORMS[form]).figures["flops"]
    whole_square = (
        sum(flops.values()) + flops["attention"]
    )  # eager attention computes what causality forbids
    assert whole_square == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_a_micro_batch_holds_its_own_rows_only() -> None:
    whole, part = (predict("llama", micro_batch=rows).figures for rows in (None, 1))
    for name in ("student", "teacher", "backward", "loss"):
        assert part["memory"][name] == pytest.approx(whole["memory"][name] / ROWS)
    assert part["memory"]["spans"] == whole["memory"]["spans"]  # merged once per batch
    assert part["flops"] == whole["flops"]


def test_sharding_leaves_less_of_the_optimiser_on_a_gpu() -> None:
    parameters = sum(p.numel() for p in MergeModule(64).parameters())
    told = [predict("llama", strategy=name).figures for name in ("ddp", "deepspeed")]
    plain, sharded = (figures["memory"]["module"] for figures in told)
    assert plain == parameters * (4 + 4 + 8 + 4)  # weights, gradients, moments, DDP's buckets
    assert sharded == parameters * (4 + 4 + (8 + 4 + 4) / 2)


def test_time_is_that_of_the_flops_and_of_the_exchange() -> None:
    fast = HARDWARE.model_copy(update={"memory_bandwidth_gbs": 1e9})
    told = predict("llama", hardware=fast).figures
    exchange = 4 * sum(p.numel() for p in MergeModule(64).parameters()) / 32e9
    assert told["exchange_seconds"] == pytest.approx(exchange)
    assert told["step_seconds"] == pytest.approx(told["step_flops"] / (MFU * 1e14) + exchange)
    assert told["seconds"] == pytest.approx(10 * told["step_seconds"])


def test_rule_rows_take_their_table_and_moments_and_no_exchange() -> None:
    plain, rowed = (predict("llama", ModuleForm(rule_rows=k)) for k in (0, 1000))
    added = rowed.memory_parts["module and AdamW"] - plain.memory_parts["module and AdamW"]
    assert added == pytest.approx(1000 * CONFIGS["llama"].hidden_size * 4 * 3)
    assert rowed.figures["exchange_seconds"] == plain.figures["exchange_seconds"]


def test_a_step_is_not_faster_than_the_memory() -> None:
    slow = HARDWARE.model_copy(update={"memory_bandwidth_gbs": 1e-3, "bf16_tflops": 1e6})
    told = predict("llama", hardware=slow).figures
    assert told["step_seconds"] > 3 * told["memory"]["weights"] / 1e6


@pytest.mark.parametrize(
    ("vocab", "reduction", "largest"),
    [(97, 0.5, "backward"), (50_000, 0.5, "loss"), (97, 0.99, "teacher")],
)
def test_the_parts_that_are_shown_add_up_to_the_total(
    vocab: int, reduction: float, largest: str
) -> None:
    told = predict_distillation(
        BackboneShape.of_config(CONFIGS["llama"]).model_copy(update={"vocab_size": vocab}),
        FORMS["paper"],
        rows=1000 * ROWS,
        segment_length=LENGTH,
        bf16=False,
        strategy="ddp",
        hardware=HARDWARE.model_copy(update={"expected_token_reduction": reduction}),
        steps=10,
    )
    memory = told.figures["memory"]
    working = {
        "teacher": memory["teacher"],
        "loss": memory["student"] + memory["loss"],
        "backward": memory["student"] + memory["backward"],
    }
    assert max(working, key=working.__getitem__) == largest
    kept = sum(memory[name] for name in ("weights", "module", "spans", "context"))
    assert told.memory_bytes == pytest.approx(kept + working[largest])
    total, *parts = (line.split() for line in told.lines() if "GiB" in line)
    assert total[-3:] == ["of", "48,", "fits"]
    shown = sum(float(words[-2]) for words in parts)
    assert shown == pytest.approx(float(total[4]), abs=0.005 * (len(parts) + 1))


def test_a_training_that_does_not_fit_is_refused() -> None:
    told = predict("llama", hardware=HARDWARE.model_copy(update={"gpu_memory_gib": 1.0}))
    assert told.figures["fits"] is False
    assert any("does not fit" in line for line in told.lines())
    message = r"distillation must take at most 1 GiB of memory; got 1\.5\d* GiB predicted for 2 x "
    with pytest.raises(ResourceLimitError, match=message + r".*Lower distill\.micro_batch or"):
        told.check()
    replace(told, limits=Limits()).check()
