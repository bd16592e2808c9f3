"""An exported model next to our own engine, with prompts that hold its spans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.source_tree import ROOT
from umim_core import UMIM
from umim_core.serving.prompt_merger import PromptMerger

SPANS = 300


@dataclass(frozen=True)
class Exported:
    """A checkpoint, what ``umim export`` made of it, and prompts that hold its spans."""

    checkpoint: Path
    directory: Path

    @cached_property
    def merger(self) -> PromptMerger:
        return PromptMerger.load(self.directory)

    @cached_property
    def umim(self) -> UMIM:
        """Our engine with the exported spans as rules."""
        own = UMIM.from_pretrained(self.checkpoint, dtype="float32")
        return UMIM(own.backbone, replace(own.checkpoint, rules=self.merger.rules))

    @cached_property
    def model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.directory)
        return model.eval()

    def prompts(self, count: int, tokens: int = 120) -> list[list[int]]:
        """Raw ids of real texts."""
        pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
        ids = self.umim.backbone.encode("\n".join(pages))
        starts = np.linspace(0, len(ids) - tokens, count).astype(int)
        return [ids[start : start + tokens] for start in starts]
