"""Options of a corpus: how commands read its names; light to import, but for typer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

SourceKind = Literal["text", "jsonl", "parquet", "dataset", "ids"]


@dataclass(frozen=True)
class Reading:
    """Options of a corpus, in words of the commands; what is None is not given.

    Attributes:
        kind: What the names hold; by default as their endings say.
        field: Text field of JSONL, parquet, data sets (text).
        split: Split of a data set (train; umim ppl: test).
        config: Configuration of a data set.
        max_bad: Unusable rows to skip before giving up (0).
    """

    kind: SourceKind | None = None
    field: str | None = None
    split: str | None = None
    config: str | None = None
    max_bad: Annotated[int | None, typer.Option(min=0)] = None

    @property
    def given(self) -> dict[str, str | int]:
        """All that are given, by their names."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def flags(self) -> dict[str, str | int]:
        """All that are given, as options of a command."""
        return {f"--{name.replace('_', '-')}": value for name, value in self.given.items()}
