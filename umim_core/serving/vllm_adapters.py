"""Models of vLLM with gated adapters: low-rank additions where a token is a merged span.

    y = W x + [id >= V] (x A) B        qkv_proj: A = [A_q A_k A_v], B = blocks of B_q, B_k, B_v

The gate is of each token's id alone, so prefix caching, chunked prefill and mixed batches need
nothing. Rows of raw tokens keep the bits of vLLM's own layer: zero is added. Two forms of one sum:

    on a CPU without torch.compile    merged rows are gathered; where none is merged, generated
                                      tokens say, nothing is computed
    else                              all rows, (x A) times a mask of 0 and 1: shapes and addresses
                                      are static, as torch.compile and CUDA graphs want them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.platforms import current_platform

from umim_core.errors import ArtifactError, ConfigError, require
from umim_core.serving.span_files import read_adapters, read_record


class _Gate:
    """The merged rows among the tokens that a model reads; all its layers share one gate."""

    def __init__(self, config: VllmConfig) -> None:
        self.mask = torch.zeros(config.scheduler_config.max_num_batched_tokens, 1)  # 1 at them
        self.rows: Tensor | None = None  # their places [M] where rows are gathered, if any
        eager = config.compilation_config.mode == CompilationMode.NONE
        self.gathers = eager and current_platform.is_cpu()

    def read(self, merged: Tensor) -> None:
        """Take which tokens are merged [N] (bool)."""
        if self.gathers:
            rows = merged.nonzero().view(-1)
            self.rows = rows if len(rows) else None
        else:
            self.mask[: len(merged), 0] = merged


class _Addition:
    """Hook of a linear layer that adds (x A) B to what it returns, at merged rows.

    Pairs are A [in, r] and B [r, out] of each map that the layer holds side by side.
    """

    def __init__(self, gate: _Gate, pairs: list[tuple[Tensor, ...]]) -> None:
        self._gate = gate
        self.down = torch.cat([down for down, _ in pairs], dim=1).to(gate.mask)
        blocks: Tensor = torch.block_diag(*(up for _, up in pairs))  # type: ignore[no-untyped-call]
        self.up = blocks.to(gate.mask)

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Return the layer's output [N, out] with the addition, and its bias as it came."""
        (x, *_), (out, bias) = inputs, output
        if not self._gate.gathers:
            return out + (x @ self.down * self._gate.mask[: len(x)]) @ self.up, bias
        if (rows := self._gate.rows) is not None:
            out.index_add_(0, rows, x[rows] @ self.down @ self.up)
        return out, bias


class _Adapted:
    """Front of a model class of vLLM: the gate, and the adapters of its layers."""

    packed_modules_mapping: dict[str, list[str]]
    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        _check(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]  # the model
        directory = Path(vllm_config.model_config.model)
        self._first_span = read_record(directory).vocab_size
        self._gate = _Gate(vllm_config)
        matrices = read_adapters(directory)
        for number, layer in enumerate(self.model.layers):
            left = set(matrices)
            for name, linear in layer.named_modules():
                parent, _, leaf = name.rpartition(".")
                names = [f"{parent}.{n}" for n in self.packed_modules_mapping.get(leaf, [leaf])]
                if isinstance(linear, LinearBase) and left.issuperset(names):
                    pairs = [tuple(part[number] for part in matrices[n]) for n in names]
                    linear.register_forward_hook(_Addition(self._gate, pairs))
                    left.difference_update(names)
            rule = "adapters must be of linear maps of the model"
            require(not left, ArtifactError, rule, sorted(left), "Export it again.")

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        """Return what the model does, with adapters where an id [N] is a span's."""
        self._gate.read(input_ids >= self._first_span)
        return super().forward(input_ids, *args, **options)  # type: ignore[misc]  # the model


def _check(config: VllmConfig) -> None:
    """Refuse what the additions do not reach, or would be wrong with."""
    parallel = config.parallel_config
    given = {
        "--tensor-parallel-size and --pipeline-parallel-size": parallel.world_size > 1,
        "--enable-lora": config.lora_config,
        "--quantization": config.quant_config,
        "--enable-prompt-embeds": config.model_config.enable_prompt_embeds,
        "--enable-dbo": parallel.use_ubatching,
    }
    refused = [option for option, value in given.items() if value]
    rule = "a model with adapters runs whole on each device, as it was exported"
    remedy = "Leave it out; --data-parallel-size is for several devices."
    require(not refused, ConfigError, rule, ", ".join(refused), remedy)


class UmimLlamaForCausalLM(_Adapted, LlamaForCausalLM):  # type: ignore[misc]  # no types here
    """Llama with adapters of merged spans."""


class UmimQwen2ForCausalLM(_Adapted, Qwen2ForCausalLM):  # type: ignore[misc]  # no types here
    """Qwen 2 with adapters of merged spans."""
