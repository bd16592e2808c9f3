"""Sides of ``stock_tasks``: models that merge nothing, and checkpoints by their way of merging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from benchmarks.common import Report, facts
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.tokenizer_files import resolve_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import Merge, check_raw_tail
from umim_core.rules.ruleset import RuleSet

if TYPE_CHECKING:
    from lm_eval.api.model import LM

HF: Final = "hf"  # lm-eval's own model
BASE: Final = "none"
NO_RULES: Final = "no rules"  # our scorer over an empty rule set
UNMERGED: Final = (HF, BASE, NO_RULES)
MERGES: Final[tuple[Merge, ...]] = ("prompt", "all")
LIBRARIES: Final = ("lm_eval", "numpy", "torch", "transformers")


@dataclass(frozen=True)
class Side:
    """One model that answers the questions.

    Attributes:
        way: One of ``UNMERGED``, or what is merged.
        checkpoint: Name of the checkpoint that merges; empty where nothing is merged.
        raw_tail: Last tokens of each context that stay raw.
    """

    way: str
    checkpoint: str = ""
    raw_tail: int = 0

    @property
    def label(self) -> str:
        """Label in the results: ``hf``, or ``NAME, prompt, raw tail 16``."""
        tail = f"raw tail {self.raw_tail}" if self.raw_tail else ""
        return ", ".join(filter(None, (self.checkpoint, self.way, tail)))


def base_of(sides: Iterable[str]) -> str:
    """Return the side that differences are taken to: ``none``, else ``hf``, else ``no rules``."""
    return next(way for way in (BASE, HF, NO_RULES) if way in sides)


def settings(
    checkpoints: Iterable[str], merges: Sequence[str], raw_tails: Sequence[int]
) -> Iterator[Side]:
    """Yield every way of merging of every checkpoint; raw tails are tails of contexts alone.

    Raises:
        ConfigError: If a raw tail is negative.
    """
    for tail in raw_tails:
        check_raw_tail(tail, "prompt")
    for name in checkpoints:
        for merge in merges:
            for tail in dict.fromkeys(raw_tails) if merge == "prompt" else [0]:
                yield Side(merge, name, tail)


@dataclass(frozen=True)
class Models:
    """The models under measurement; their one backbone is loaded when it is first needed.

    Attributes:
        checkpoints: Module and rules by name. The first one lends its module to the side without
            rules, which never uses it.
        backbone_name: Name or directory of their backbone.
        dtype: Of the backbone's weights.
        batch_size: Answers per forward, or ``auto``.
    """

    checkpoints: Mapping[str, Checkpoint]
    backbone_name: str
    dtype: str
    batch_size: int | str

    @cached_property
    def backbone(self) -> Backbone:
        """The frozen model, shared by all sides but lm-eval's own."""
        return load_backbone(self.backbone_name, dtype=self.dtype, local_files_only=True)

    def model(self, side: Side) -> LM:
        """Return the lm-eval model of a side."""
        from lm_eval.models.huggingface import HFLM

        from umim_core.evaluation.harness import UmimLM

        if side.way == HF:
            where = resolve_backbone(self.backbone_name)
            return HFLM(where, dtype=self.dtype, batch_size=self.batch_size, device="cpu")
        checkpoint = next(iter(self.checkpoints.values()))
        if side.way == BASE:
            return UmimLM(checkpoint, "none", self.backbone, batch_size=self.batch_size)
        if side.way == NO_RULES:
            origin = checkpoint.config.tokenizer_fingerprint
            rules = RuleSet.from_spans([], tokenizer_fingerprint=origin)
            bare = checkpoint.with_contents(checkpoint.module, rules)
            return UmimLM(bare, "prompt", self.backbone, batch_size=self.batch_size, raw_tail=0)
        return UmimLM(
            self.checkpoints[side.checkpoint],
            "all" if side.way == "all" else "prompt",
            self.backbone,
            batch_size=self.batch_size,
            raw_tail=side.raw_tail,
        )

    def key(self, task: str, side: Side, data: str, limit: int | None) -> Report:
        """Return whatever decides the content of a cell; the backbone is the one in use."""
        merging = self.checkpoints.get(side.checkpoint)
        found: Report = {
            "task": task,
            "side": side.way,
            "limit": limit,
            "data": data,
            "backbone": self.backbone.fingerprint,
            "tokenizer": self.backbone.tokenizer_fingerprint,
            "module": merging.module.digest() if merging else None,
            "rules": merging.rules.digest if merging else None,
            "unit_positions": merging.config.unit_positions if merging else None,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "versions": facts(LIBRARIES, None)["versions"],
        }
        return found | ({"raw_tail": side.raw_tail} if side.raw_tail else {})
