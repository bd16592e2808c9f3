"""Shared options of the ``umim`` commands, and the text they are given."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from umim_core.config.form import Merge, check_raw_tail
from umim_core.encodable import encoding_error
from umim_core.errors import ConfigError, CorpusError

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        help="A name that umim path lists, a directory or a hub repository; by default "
        "umim-smollm2-135m-adapters, or umim-docs-llama where its model cannot be fetched.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, or cuda (cuda:1 and so on) where there is a GPU.")
]
PlaceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda; without it, a GPU where there is one.")
]
FieldOption = Annotated[str, typer.Option(help="Text field of JSONL, parquet, data sets.")]
ConfigOption = Annotated[str | None, typer.Option(help="Configuration of a data set.")]
ProtectOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Regular expression of tokens that no rule may contain, or digits, capitals, "
        "newlines; may be repeated."
    ),
]
SpecialTokensOption = Annotated[
    bool | None,
    typer.Option(
        "--special-tokens/--no-special-tokens",
        help="Add special tokens, a BOS say; by default as the tokenizer does.",
    ),
]
DTYPE_NAMES: Final = ("auto", "published", "bfloat16", "float16", "float32", "float64")


def _checked_tail(raw_tail: int | None) -> int | None:
    """Refuse a negative raw tail before anything is fetched or loaded."""
    check_raw_tail(raw_tail or 0, "prompt")
    return raw_tail


MergeOption = Annotated[
    Merge | None,
    typer.Option(help="What is merged; none is the base model. [default: the checkpoint's]"),
]
RawTailOption = Annotated[
    int | None,
    typer.Option(
        callback=_checked_tail,
        help="Last tokens of the prompt that stay raw. [default: the checkpoint's with its own "
        "--merge, else 0]",
    ),
]
TargetOption = Annotated[
    float | None,
    typer.Option(
        "--target-tr",
        min=0.0,
        max=0.75,
        help="Merge by the cheapest rules that save this share of tokens, as umim prune measured "
        "it; in place of --budget. [default: all rules]",
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Merge by rules of at most so many nats per saved token, as umim prune measured "
        "them. [default: all rules]",
    ),
]


def _known_dtype(dtype: str) -> str:
    """Refuse an unknown data type before anything is fetched or loaded."""
    if dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"dtype must be one of {', '.join(DTYPE_NAMES)}", dtype, "Choose one of them."
        )
    return dtype


DtypeOption = Annotated[
    str,
    typer.Option(
        callback=_known_dtype,
        help="Data type of the backbone; auto: bfloat16 where the device computes it faster, else "
        "float32; published: that of its weights.",
    ),
]


def given_text(argument: str | None) -> str:
    """Return the argument, or stdin for "-" or nothing."""
    if argument is not None and argument != "-":
        if (error := encoding_error(argument)) is not None:  # so Python marks other bytes
            raise CorpusError("a text must be UTF-8", str(error), "Convert the text.") from error
        return argument
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("a text must be given", "nothing", "Pass it, or pipe it into stdin.")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CorpusError("stdin must be UTF-8", str(error), "Convert the text.") from error
