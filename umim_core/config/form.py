"""Forms of the merge module, as recipes, checkpoints and modules name them; the paper's by default.

A linear module has a weight per offset, hence sees the order without positions. Learned offsets
count from the last token where rules may have more than four. ``unit_positions`` is no part of the
module itself: it says which positions the backbone gives to units while the module is trained, and
ever after::

    ids        x1 x2 x3 x4 x5        units  [x1] [x2 x3] [x4] [x5]
    raw         0  1  2  3  4        compact  0     1      2    3      preserved  0  2  3  4

What a caller wants merged is no part of the form; it has the same words everywhere::

    merge     prompt (context)   generated or scored tokens
    all       merged             merged
    prompt    merged             raw
    none      raw                raw                            the base model

``raw_tail`` leaves the last tokens of a prompt raw where prompts are merged: ids 1 2 3 4 5 with
``raw_tail`` 2 are matched as 1 2 3, and 4 and 5 are units of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import Field, model_validator

from umim_core.config.model_base import AtLeast0, Model, checking, validated
from umim_core.errors import ConfigError, require

Positions = Literal["none", "learned"]
Depth = Literal[1, 3]
Residual = Literal["none", "last", "exponential"]
UnitPositions = Literal["compact", "preserved"]
Merge = Literal["all", "prompt", "none"]
MERGES: Final[tuple[Merge, ...]] = get_args(Merge)
SAFE_MERGE: Final[Merge] = "prompt"  # what checkpoints recommend that say nothing else
SAFE_RAW_TAIL: Final = 16  # last tokens of a prompt that they keep raw
PAPER: Final = "attention"


class ModuleForm(Model):
    """The form of a merge module and of its use, as fields of a configuration."""

    module_positions: Positions = "none"
    """What the module sees of a token's offset in its span: nothing, or a vector."""
    depth: Depth = 1
    """Layers before a span is pooled: 1 projects each token, 3 puts two of self-attention first."""
    kind: Literal["attention", "linear"] = PAPER
    """How a span becomes one embedding: pooled by attention, or one linear layer over it."""
    residual: Residual = "none"
    """What the module adds to: nothing, the last token, or an average with weights 1, 2, 4, 8."""
    rule_rows: AtLeast0 = 0
    """Most frequent rules that have a learned vector each, added to the module's."""
    unit_positions: UnitPositions = "compact"
    """Positions of units in the backbone: 0, 1, 2 ..., or that of the last raw token of each."""
    merge_depth: AtLeast0 = 0
    """Layers that read every token before spans merge; 0: embeddings merge."""
    adapter_rank: Annotated[int, Field(ge=0, le=256)] = 0
    """Rank of the adapters that act on merged units alone; 0: none."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        with checking():
            require(
                self.kind == PAPER or (self.module_positions, self.depth) == ("none", 1),
                ConfigError,
                f"a {self.kind} merge module must have positions 'none' and depth 1",
                f"positions {self.module_positions!r}, depth {self.depth}",
                "Leave them out, or take another kind.",
            )
            require(
                not self.merge_depth
                or (self.residual, self.unit_positions) == ("last", "preserved"),
                ConfigError,
                "merge_depth above 0 must have residual 'last' and unit_positions 'preserved'",
                f"merge_depth {self.merge_depth}, residual {self.residual!r}, "
                f"unit_positions {self.unit_positions!r}",
                "Add them, or merge at depth 0.",
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _typed(cls, raw: object, read: Callable[[object], Self]) -> Self:
        return validated(cls, raw, read=read) if cls is ModuleForm else read(raw)

    def form(self) -> dict[str, object]:
        """Return the form's fields alone."""
        return self.model_dump(include=set(ModuleForm.model_fields))

    def alone(self) -> ModuleForm:
        """Return the form of a cell or of a checkpoint, which have more fields."""
        return ModuleForm.model_validate(self.form())

    def deviations(self) -> tuple[str, ...]:
        """Return in words where it deviates from the paper's form, for labels."""
        words = (
            "" if self.kind == PAPER else self.kind,
            "" if self.depth == 1 else f"depth {self.depth}",
            "" if self.module_positions == "none" else f"{self.module_positions} positions",
            "" if self.residual == "none" else f"{self.residual} residual",
            f"{self.rule_rows:,} rule rows" if self.rule_rows else "",
            "" if self.unit_positions == "compact" else f"{self.unit_positions} unit positions",
            f"merge depth {self.merge_depth}" if self.merge_depth else "",
            f"adapters of rank {self.adapter_rank}" if self.adapter_rank else "",
        )
        return tuple(filter(None, words))


PAPER_FORM: Final = ModuleForm()


def check_row_rate(name: str, rate: float, trained: Sequence[ModuleForm]) -> None:
    """Refuse a learning rate of rule rows where no form that is trained has any.

    It would change stage keys and nothing else.
    """
    if rate != 1.0 and not any(form.rule_rows for form in trained):
        raise ValueError(
            f"{name} needs a cell with rule_rows that it trains; got {rate:g}: leave it out, or "
            "give such a cell rule_rows"
        )


def check_merge(merge: str, known: Sequence[Merge] = MERGES) -> None:
    """Refuse a value of ``merge`` that does not exist, or that a caller has no use for."""
    if merge not in known:
        raise ConfigError(f"merge must be one of {tuple(known)}", merge, "Choose one of them.")


def check_raw_tail(raw_tail: object, merge: Merge) -> None:
    """Refuse a ``raw_tail`` that is no number of tokens, or that has no effect."""
    if isinstance(raw_tail, bool) or not isinstance(raw_tail, int) or raw_tail < 0:
        raise ConfigError(
            "raw_tail must be an integer of at least 0",
            raw_tail,
            "Give the number of tokens at the end of a prompt that stay raw, 16 for example.",
        )
    if raw_tail and merge == "none":
        raise ConfigError(
            "raw_tail needs a prompt that is merged",
            f"raw_tail {raw_tail} with merge 'none'",
            "Merge all or prompt, or leave it out.",
        )
