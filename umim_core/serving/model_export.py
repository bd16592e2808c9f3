"""Export of a model with K spans as ids: V + K rows of a plain Hugging Face directory.

A surrogate depends on its span's ids alone, so K spans are K more rows of the embedding, and an
engine that knows nothing of UMIM reads merged prompts::

    config.json model.safetensors generation_config.json   V + K rows; the head is untied
    tokenizer.json ...                                      unchanged: it writes no new id
    umim_spans.json umim_spans.table                        which span has which id
    model.gguf                                              the same model, where it is wanted
    umim_adapters.table                                     adapters of merged units, if it has any

The head's new rows are zero and no bound on what an engine writes: every engine must mask the new
ids. ``generation_config.json`` does it for transformers (``suppress_tokens``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as theirs

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin
from umim_core.backbone.tokenizer_files import save_tokenizer
from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.checkpoint.module_weights import refused_tensors
from umim_core.config.form import SAFE_RAW_TAIL, check_raw_tail
from umim_core.errors import BackboneError, ConfigError, require
from umim_core.model.umim import UMIM
from umim_core.model_sources.gguf_writing import write_gguf
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.span_files import ARCHITECTURES, write_adapters
from umim_core.store.publication import publish_directory

GGUF: Final = "model.gguf"
_CHUNK: Final = 4096  # spans that are merged at once
_PROBE: Final = 8  # units tried
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}  # of the norm


def check_exportable(config: CheckpointConfig, *, gguf: bool = False) -> None:
    """Refuse a checkpoint whose merged spans are more than rows of an embedding, and adapters."""
    family = config.backbone_model.model_type
    remedy = (
        "Export a checkpoint whose spans become input embeddings, umim-smollm2-135m say, or of "
        "umim tune --merge-depth 0; umim serve runs every checkpoint."
    )
    for name, value in {"merge_depth": 0, "unit_positions": "compact"}.items():
        rule = f"{name} must be {value} in a model that other engines read"
        found = getattr(config, name)
        require(found == value, ConfigError, rule, found, remedy)
    rule = "a model with adapters has no GGUF file: llama.cpp and OpenVINO cannot apply them"
    remedy = "Leave out --gguf and use vLLM, or export a checkpoint without adapters."
    found = f"adapter_rank {config.adapter_rank}"
    require(not (config.adapter_rank and gguf), ConfigError, rule, found, remedy)
    rule = f"adapters are exported of {', '.join(ARCHITECTURES)}"
    found = config.backbone
    remedy = "Use umim serve, or export a checkpoint without adapters."
    fits = not config.adapter_rank or family in ARCHITECTURES
    require(fits, ConfigError, rule, f"{found} is {family}", remedy)


def export_model(
    umim: UMIM, rules: RuleSet, out: Path, *, raw_tail: int | None = None, gguf: bool = False
) -> None:
    """Write a model with one more id for each span; the rules it has itself have no part in it.

    The span at place i of the sorted rules gets the id V + i. The last ``raw_tail`` tokens of each
    part of a prompt stay raw: by default as the checkpoint recommends, 16 where it recommends no
    merging.
    """
    config = umim.checkpoint.config
    check_exportable(config, gguf=gguf)
    recommended = SAFE_RAW_TAIL if config.merge == "none" else config.raw_tail
    tail = recommended if raw_tail is None else raw_tail
    check_raw_tail(tail, "prompt")
    backbone = umim.backbone
    tokenizer = backbone.require_tokenizer()
    size = backbone.vocab_size
    rules.check_for_module(backbone.tokenizer_fingerprint, size, backbone.special_ids)
    spans = PromptMerger(rules, size, tail, config.roles)
    rows = surrogates(umim, spans)
    model = _widened(backbone, rows)
    _check(backbone, model, rows[:_PROBE])

    def write(directory: Path) -> None:
        save_tokenizer(tokenizer, directory)
        with _without_deepspeed(), _silent(), refused_tensors(model.parameters(), directory):
            model.save_pretrained(directory)
        for weights in directory.glob("*.safetensors"):
            weights.chmod(0o644)  # left to the owner alone, but an engine may be another user
        if (adapters := umim.module.adapters) is not None:
            write_adapters(directory, adapters, backbone.model.config.model_type)
        spans.write(directory)
        if gguf:
            write_gguf(directory, directory / GGUF, backbone.name)

    publish_directory(out, write)


@contextmanager
def _silent() -> Iterator[None]:
    """Let transformers draw no progress bar: errors have stderr to themselves."""
    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]  # as the next one
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _without_deepspeed() -> Iterator[None]:
    """Let accelerate find no DeepSpeed, in all threads of the process, unless it is loaded.

    It imports it, for seconds and with a warning, to see whether the saved model is wrapped in it.
    """
    if is_new := "deepspeed" not in sys.modules:
        sys.modules["deepspeed"] = None  # type: ignore[assignment]  # the import system's own word
    try:
        yield
    finally:
        if is_new:
            sys.modules.pop("deepspeed", None)


@torch.no_grad()
def surrogates(umim: UMIM, merger: PromptMerger) -> Tensor:
    """Return the surrogates of all spans [K, d] in the backbone's data type."""
    ids = torch.from_numpy(merger.spans.astype(np.int64))
    lengths, rows = torch.from_numpy(merger.rules.sizes.astype(np.int64)), []
    for part, sizes in zip(torch.split(ids, _CHUNK), torch.split(lengths, _CHUNK), strict=True):
        spans = part[:, : int(sizes.max())].clamp(min=0).to(umim.backbone.device)
        rows.append(umim.merged_model.surrogates(spans, sizes.to(spans.device)))
    return torch.cat(rows)


@torch.no_grad()
def _widened(backbone: Backbone, rows: Tensor) -> PreTrainedModel:
    """Return a twin of the model with more rows; all other weights are shared."""
    twin = frozen_twin(backbone.model)
    embedding, head = twin.get_input_embeddings(), twin.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    size, count = backbone.vocab_size, len(rows)
    stored = (rows.float() / _scale(backbone)).to(backbone.dtype)
    twin.set_input_embeddings(_with_rows(embedding, stored))
    twin.set_output_embeddings(_with_rows(head, torch.zeros_like(stored)))  # type: ignore[no-untyped-call]  # theirs
    twin.config = deepcopy(twin.config)
    twin.config.vocab_size, twin.config.tie_word_embeddings = size + count, False
    generation = deepcopy(twin.generation_config)
    assert generation is not None  # noqa: S101  causal language models have one
    masked = set(generation.suppress_tokens or ()) | set(range(size, size + count))
    generation.suppress_tokens = sorted(masked)
    twin.generation_config = generation
    return twin


def _with_rows(module: nn.Module, rows: Tensor) -> nn.Module:
    """Return a copy of an embedding or a head with further rows; a bias gets zeros."""
    wide = copy(module)
    wide._parameters = {
        name: None
        if value is None
        else nn.Parameter(
            torch.cat([value, rows if value.ndim == 2 else rows.new_zeros(len(rows))]),
            requires_grad=False,
        )
        for name, value in module._parameters.items()
    }
    size = "num_embeddings" if isinstance(module, nn.Embedding) else "out_features"
    setattr(wide, size, getattr(module, size) + len(rows))
    return wide


def _scale(backbone: Backbone) -> float:
    """Return the number that the embedding multiplies its rows with."""
    ids = torch.arange(min(backbone.vocab_size, 64), device=backbone.device)
    stored, read = backbone.embedding_weight[ids].double(), backbone.embed(ids).double()
    scale = float((stored * read).sum() / (stored * stored).sum())
    same = torch.allclose(stored * scale, read, rtol=_TOLERANCE.get(backbone.dtype, 1e-4))
    rule = "embeddings must be the rows of a matrix, or a multiple of them"
    remedy = "Other engines could not read merged spans as rows; use umim serve."
    require(same, BackboneError, rule, backbone.name, remedy)
    return scale


@torch.no_grad()
def _check(backbone: Backbone, model: PreTrainedModel, rows: Tensor) -> None:
    """Refuse a model that reads its first new ids otherwise than our engine does."""
    ids = torch.arange(min(len(rows), backbone.vocab_size), device=backbone.device)
    wanted = backbone.head(backbone.hidden(torch.cat([backbone.embed(ids), rows])[None]))
    new = torch.cat([ids, torch.arange(len(rows), device=ids.device) + backbone.vocab_size])
    logits = model(input_ids=new[None]).logits[..., : backbone.vocab_size]
    off = float((logits - wanted).float().norm() / wanted.float().norm())
    rule = "a model with more rows must read merged spans as our engine does"
    found = f"{backbone.name}: logits differ by {off:.1e} of their norm"
    remedy = "Other engines cannot run it merged; use umim serve."
    require(off <= _TOLERANCE.get(backbone.dtype, 1e-4), BackboneError, rule, found, remedy)
