"""Data of the report; ``report.py`` turns it into pages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.report.comparison import ComparisonRow
from umim_core.adaptation.settings import WT

Point = tuple[int, float | None]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossCurve(_Part):
    """Losses of one training run.

    Attributes:
        label: Which cell was trained, e.g. ``umim-docs-llama, τ 5``.
        train: (step, value) on the training batches.
        validation: (step, value) on the validation split.
        quantity: ``KL`` or ``cross-entropy`` (nats per aligned row), or ``preference`` loss.
    """

    label: str
    train: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()
    quantity: Literal["KL", "cross-entropy", "preference"] = "cross-entropy"


class SpeedRow(_Part):
    """One measured speed, base and UMIM side by side.

    Attributes:
        label: Which checkpoint and rules.
        phase: Reading the prompt, generating, or both.
        prompt_tokens: Raw tokens of the prompt.
        batch_size: Rows side by side.
        base_tokens_per_s: Raw tokens per second, base model.
        umim_tokens_per_s: Raw tokens per second, UMIM (matching and merging included).
        token_reduction: Realised TR of the prompt, 0..1.
        bound: Largest speed-up that this TR can give.
        base_kv_bytes: Keys and values at the end of the phase, base model.
        umim_kv_bytes: The same for UMIM.
    """

    label: str
    phase: Literal["prefill", "decode", "request"] = "prefill"
    prompt_tokens: int = Field(gt=0)
    batch_size: int = Field(default=1, gt=0)
    base_tokens_per_s: float | None
    umim_tokens_per_s: float | None
    token_reduction: float | None = None
    bound: float | None = None
    base_kv_bytes: int | None = None
    umim_kv_bytes: int | None = None

    @property
    def ratio(self) -> float | None:
        """UMIM speed over base speed, or None where one is missing."""
        if not self.base_tokens_per_s or self.umim_tokens_per_s is None:
            return None
        return self.umim_tokens_per_s / self.base_tokens_per_s


class BreakEvenRow(_Part):
    """From which prompt length on a checkpoint pays.

    Attributes:
        label: Which checkpoint and rules.
        phase: Reading the prompt, generating, or both.
        batch_size: Rows side by side.
        prompt_tokens: Measured lengths, rising.
        pays_from: Least of them from which UMIM is faster, lower quartile included; None if never.
    """

    label: str
    phase: Literal["prefill", "decode", "request"]
    batch_size: int = Field(gt=0)
    prompt_tokens: tuple[int, ...]
    pays_from: int | None


class RuleCounts(_Part):
    """Number of n-grams of each order that pass each step of mining.

    Attributes:
        label: Which rule set.
        raw: Count by order of n-grams that reach the threshold.
        overlap: Count by order after the overlap filter.
        rules: Count by order after the containment filter.
    """

    label: str
    raw: dict[int, int] = Field(default_factory=dict)
    overlap: dict[int, int] = Field(default_factory=dict)
    rules: dict[int, int]


class SpanExample(_Part):
    """A text cut into units.

    Attributes:
        label: Which rule set cut it.
        spans: (text, raw tokens in the unit) in order; 2 or more tokens means merged.
    """

    label: str
    spans: tuple[tuple[str, int], ...]

    @property
    def token_reduction(self) -> float:
        """Share of raw tokens that merging removed, 0..1."""
        tokens = sum(n for _, n in self.spans)
        return 1 - len(self.spans) / tokens if tokens else 0.0


class AttentionExample(_Part):
    """Attention of one layer, raw and merged, between the units of one text.

    Attributes:
        label: Which checkpoint and layer.
        units: Text of each unit.
        tokens: Raw tokens of each unit.
        before: Attention [query][key] over raw tokens, those of a unit added up.
        after: The same over units.
    """

    label: str
    units: tuple[str, ...]
    tokens: tuple[int, ...]
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]


class SimilarityRow(_Part):
    """Mean cosine similarities of the surrogates of one order.

    Attributes:
        order: Tokens of a span.
        spans: Number of spans.
        by_offset: With the embedding of the token at each offset.
        mean: With the mean of the span's embeddings.
        random: With a random token's embedding.
    """

    order: int
    spans: int
    by_offset: tuple[float, ...]
    mean: float
    random: float


class CheckpointPlace(_Part):
    """Place of a checkpoint.

    Attributes:
        label: Which cell and setting.
        path: Directory, or the name that ``umim generate -c`` takes.
    """

    label: str
    path: str


class ReportData(_Part):
    """Everything the report shows.

    Attributes:
        recipe: Name of the recipe.
        config: The validated recipe.
        host: Facts of the machine, in the order to be shown.
        rows: The comparison, in the order to be shown; the first one leads the page.
        checkpoints: What was trained and measured, in the same order.
        curves: Losses by cell.
        throughput: Speeds.
        break_even: From which prompt length on merging pays.
        rule_counts: Mining by rule set.
        examples: Texts with their merged spans.
        attention: Attention before and after merging; None where not measured.
        similarity: Surrogates against their tokens, by order.
        chance: Accuracy of guessing on the task, 0..1; None where unknown.
        links: Addresses by name (the MLflow and Prefect pages of the run).
    """

    recipe: str
    config: dict[str, object] = Field(default_factory=dict)
    host: dict[str, str] = Field(default_factory=dict)
    rows: tuple[ComparisonRow, ...] = ()
    checkpoints: tuple[CheckpointPlace, ...] = ()
    curves: tuple[LossCurve, ...] = ()
    throughput: tuple[SpeedRow, ...] = ()
    break_even: tuple[BreakEvenRow, ...] = ()
    rule_counts: tuple[RuleCounts, ...] = ()
    examples: tuple[SpanExample, ...] = ()
    attention: AttentionExample | None = None
    similarity: tuple[SimilarityRow, ...] = ()
    chance: float | None = None
    links: dict[str, str] = Field(default_factory=dict)

    def addresses(self) -> dict[str, str]:
        """Return the links that a browser can open, by name."""
        return {n: url for n, url in self.links.items() if url.startswith(("http://", "https://"))}

    def base_rows(self) -> list[ComparisonRow]:
        """Return the rows of checkpoints that were not adapted to the task."""
        return [row for row in self.rows if row.setting == WT]

    def corpora(self) -> list[str]:
        """Return the names of the out-of-domain corpora that any row was measured on, sorted."""
        prefix = "ppl_umim_ood_"
        names = {m.removeprefix(prefix) for r in self.rows for m in r.metrics if prefix in m}
        return sorted(names)
