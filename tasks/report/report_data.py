"""Data of the report, as its JSON file holds it; ``report_page.py`` turns it into pages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.report.comparison import ComparisonRow
from umim_core.adaptation.settings import WT

Point = tuple[int, float | None]
Phase = Literal["prefill", "decode", "request"]


class Part(BaseModel):
    """A part of a result file: frozen, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LossCurve(Part):
    """Losses (step, value) of one training run; KL and cross-entropy in nats per aligned row."""

    label: str  # cell and setting, e.g. ``umim-docs-llama, τ 5, WT``
    train: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()
    quantity: Literal["KL", "cross-entropy", "preference"] = "cross-entropy"


class SpeedRow(Part):
    """One measured speed of base and UMIM, in raw tokens/s; matching and merging are included."""

    label: str  # checkpoint and rules
    phase: Phase = "prefill"
    prompt_tokens: int = Field(gt=0)  # raw
    batch_size: int = Field(default=1, gt=0)
    base_tokens_per_s: float | None
    umim_tokens_per_s: float | None
    token_reduction: float | None = None  # realised on the prompt, 0..1
    bound: float | None = None  # largest speed-up that this TR can give
    base_kv_bytes: int | None = None  # keys and values at the end of the phase
    umim_kv_bytes: int | None = None

    @property
    def ratio(self) -> float | None:
        """UMIM speed over base speed, or None where one is missing."""
        if not self.base_tokens_per_s or self.umim_tokens_per_s is None:
            return None
        return self.umim_tokens_per_s / self.base_tokens_per_s


class BreakEvenRow(Part):
    """The prompt length from which a checkpoint pays."""

    label: str  # checkpoint and rules
    phase: Phase
    batch_size: int = Field(gt=0)
    prompt_tokens: tuple[int, ...]  # measured lengths, rising
    pays_from: int | None  # the least of them that is faster, lower quartile included


class RuleCounts(Part):
    """Number of n-grams by order that pass each step of mining."""

    label: str  # rule set
    raw: dict[int, int] = Field(default_factory=dict)  # reach the threshold
    overlap: dict[int, int] = Field(default_factory=dict)  # pass the overlap filter
    rules: dict[int, int]


class SpanExample(Part):
    """A text cut into units."""

    label: str  # rule set
    spans: tuple[tuple[str, int], ...]  # (text, raw tokens of the unit), in order

    @property
    def caption(self) -> str:
        """The label with the figures of the text."""
        tokens, units = sum(n for _, n in self.spans), len(self.spans)
        reduction = 100 * (1 - units / tokens) if tokens else 0.0
        return f"{self.label}: {tokens} tokens, {units} units, TR {reduction:.1f} %"


class AttentionExample(Part):
    """Attention [query][key] of one layer between the units of one text."""

    label: str  # checkpoint and layer
    units: tuple[str, ...]
    tokens: tuple[int, ...]  # raw tokens of each unit
    before: tuple[tuple[float, ...], ...]  # over raw tokens, those of a unit added up
    after: tuple[tuple[float, ...], ...]  # over units


class SimilarityRow(Part):
    """Mean cosine similarities of the surrogates of one order with embeddings."""

    order: int
    spans: int
    by_offset: tuple[float, ...]  # of the token at each offset
    mean: float  # of the span's mean
    random: float  # of a random token


class CheckpointPlace(Part):
    """Place of a checkpoint."""

    label: str  # cell and setting
    path: str  # directory, or the name that ``umim generate -c`` takes


class ReportData(Part):
    """Everything the report shows, in the order to be shown."""

    recipe: str
    config: dict[str, object] = Field(default_factory=dict)
    host: dict[str, str] = Field(default_factory=dict)
    rows: tuple[ComparisonRow, ...] = ()  # the first one leads the page
    checkpoints: tuple[CheckpointPlace, ...] = ()
    curves: tuple[LossCurve, ...] = ()
    throughput: tuple[SpeedRow, ...] = ()
    break_even: tuple[BreakEvenRow, ...] = ()
    rule_counts: tuple[RuleCounts, ...] = ()
    examples: tuple[SpanExample, ...] = ()
    attention: AttentionExample | None = None
    similarity: tuple[SimilarityRow, ...] = ()
    chance: float | dict[str, float] | None = None  # accuracy of guessing, 0..1; of several by task
    links: dict[str, str] = Field(default_factory=dict)  # pages of MLflow and Prefect

    def addresses(self) -> dict[str, str]:
        """Return the links that a browser can open, by name."""
        return {n: url for n, url in self.links.items() if url.startswith(("http://", "https://"))}

    def chance_of(self, task: str) -> float | None:
        """Return the accuracy of guessing on a task, or None where it is unknown."""
        return self.chance.get(task) if isinstance(self.chance, dict) else self.chance

    def base_rows(self) -> list[ComparisonRow]:
        """Return the rows that were not adapted to the task, those of baselines included."""
        return [row for row in self.rows if row.setting == WT]

    def corpora(self) -> list[str]:
        """Return the names of the out-of-domain corpora that any row was measured on, sorted."""
        prefix = "ppl_umim_ood_"
        names = {m.removeprefix(prefix) for r in self.rows for m in r.metrics if prefix in m}
        return sorted(names)
