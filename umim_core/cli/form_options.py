"""Options of the ``umim`` commands that make a checkpoint: its rules and the form of its module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from umim_core.errors import ConfigError

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="The frozen model: a name of umim path, directory, .gguf file or hub repository."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Directory to write; by default one under UMIM_ROOT, see umim path."),
]
RulesOption = Annotated[Path, typer.Option(help="Rule directory that umim mine wrote.")]
ResidualOption = Annotated[
    Literal["none", "last", "exponential"],
    typer.Option(
        help="What the module adds to: nothing (the paper), the embedding of a span's last token, "
        "or an average that weighs later tokens more."
    ),
]
UnitPositionsOption = Annotated[
    Literal["compact", "preserved"],
    typer.Option(
        help="Positions of units in the model: 0, 1, 2, ... (the paper), or those of their last "
        "tokens in the text."
    ),
]
RuleRowsOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Most frequent rules that have a vector each, zero until trained, added to what the "
        "module gives; 0: none (the paper).",
    ),
]
MergeDepthOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Layers of the model that read every token before spans merge; 0: embeddings merge "
        "(the paper).",
    ),
]
AdapterRankOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Rank of adapters that act on merged units alone; raw text stays as it is. 0: none "
        "(the paper).",
    ),
]


def given_rules(rules: Path) -> None:
    """Refuse what is no rule directory, before anything heavy is imported."""
    if not (rules / "rules.parquet").is_file():
        raise ConfigError(
            "--rules must be a rule directory",
            "nothing" if rules == Path() else str(rules),
            "Make one: umim mine FILE... --tokenizer MODEL --out DIR.",
        )
