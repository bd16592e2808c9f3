"""Servers of tests: our own engine's, and a gateway before that of an exported model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.merging.merged_model import MergedModel
from umim_core.serving.engine_server import EngineServer
from umim_core.serving.gateway import Gateway, address_of
from umim_core.serving.guard import Limits
from umim_core.serving.local_engine import BatchSizes, LocalEngine, Served
from umim_core.serving.prompt_merger import PromptMerger


def engine_server(umim: UMIM, *, sizes: BatchSizes | None = None, **limits: Any) -> EngineServer:
    served = Served("tiny", umim.merged_model, "prompt", 4)
    bounds = Limits(**{"report_cached": True, **limits})
    return EngineServer(LocalEngine(served, sizes or BatchSizes()), bounds)


def exported_server(export: Path) -> EngineServer:
    """A server of an exported model that reads what it is sent."""
    backbone = load_backbone(str(export), dtype="float64")
    served = Served("model", MergedModel.without_merging(backbone), "none", 0)
    return EngineServer(LocalEngine(served, BatchSizes()), Limits(report_cached=True))


@cache  # of each export once
def _read(export: Path) -> tuple[PreTrainedTokenizerBase, PromptMerger]:
    tokens = load_tokenizer(str(export))
    return tokens, PromptMerger.load(export, tokenizer_fingerprint=tokenizer_fingerprint(tokens))


def gateway(upstream: str, export: Path, masks: bool = True, **limits: Any) -> Gateway:
    return Gateway(address_of(upstream), *_read(export), Limits(**limits), upstream_masks=masks)
