"""The probe at wrap: what is refused by name, and how little it costs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig

from support.family_configs import EXACT, REFUSED, random_model
from umim_core.backbone.backbone import wrap_backbone
from umim_core.errors import BackboneError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing",
    "ignore::DeprecationWarning",
    "ignore:.*quantize_per_tensor",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gemma2", "cohere", "mpt"])
def test_a_deviation_below_a_hundredth_is_refused_in_every_data_type(
    name: str, dtype: torch.dtype
) -> None:
    config, word = REFUSED[name]
    model = random_model(config, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)  # logits so small that a cap of 30 changes no digit of them
    with pytest.raises(BackboneError, match=f"got {type(model).__name__}: .*{word}"):
        wrap_backbone(model, None)


class _Swallows(LlamaForCausalLM):
    """A model that takes position_ids and ignores them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        rotate = self.model.rotary_emb.forward

        def columns(states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(states, torch.arange(states.shape[1])[None].expand(len(states), -1))

        self.model.rotary_emb.forward = columns


class _Mixes(LlamaForCausalLM):
    """A model whose rows see what stands in the same column of other rows."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)

        def mix(module: nn.Module, args: object, out: Tensor) -> Tensor:
            return out + 0.01 * out.mean(dim=0, keepdim=True)

        self.model.norm.register_forward_hook(mix)


def llama() -> LlamaForCausalLM:
    return random_model(EXACT["llama"])


def attending(implementation: str) -> LlamaForCausalLM:
    model = llama()
    model.config._attn_implementation = implementation
    return model


def with_lora() -> PeftModel:
    adapted = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.fill_(0.1)
    return adapted


def packed() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear})


def nowhere() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(EXACT["llama"]())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _Swallows(EXACT["llama"]()), "position_ids and a 4-D mask .*_Swallows: off by"),
        (lambda: _Mixes(EXACT["llama"]()), "got _Mixes: off by"),
        (lambda: attending("flex_attention"), "additive mask; .*attn_implementation='sdpa'"),
        (lambda: attending("flash_attention_2"), "additive mask; .*attn_implementation='sdpa'"),
        (with_lora, "got Peft.*merge_and_unload"),
        (lambda: with_lora().base_model.model, "head must be one linear projection"),
        (packed, "plain tensors; got LlamaForCausalLM: .* is packed"),
        (nowhere, "LlamaForCausalLM: .*on no device"),
    ],
)
def test_a_model_of_other_semantics_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(BackboneError, match=said):
        wrap_backbone(make(), None)


def test_a_peft_model_is_taken_once_its_adapters_are_merged() -> None:
    assert wrap_backbone(with_lora().merge_and_unload(), None).vocab_size


def test_wrapping_leaves_the_callers_model_as_it_was() -> None:
    model = llama().train()
    hooks = copy.copy(model.lm_head._forward_hooks)
    backbone = wrap_backbone(model, None)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert model.lm_head._forward_hooks == hooks
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert not any(module.training for module in backbone.model.modules())
    ours = {name: value.data_ptr() for name, value in backbone.model.named_parameters()}
    assert ours == {name: value.data_ptr() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["gemma", "gemma3_text", "biogpt", "xglm"])
def test_the_module_starts_at_the_size_of_scaled_embeddings(name: str) -> None:
    backbone = wrap_backbone(random_model(EXACT[name]), None)
    ids = torch.arange(backbone.vocab_size)
    assert torch.equal(backbone.embedding_table, backbone.embed(ids))
    assert backbone.embedding_std == pytest.approx(float(backbone.embed(ids).std()), rel=1e-6)
    assert backbone.embedding_std > 3.9 * float(backbone.embedding_weight.std())
