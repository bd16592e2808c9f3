"""Commands from functions: options are their parameters, with the words of their docstrings.

A parameter without a default is an argument; of a dataclass, every field is an option::

    def prune(files: list[str], *, limit: AtLeast1 = 9, scan: bool = False, read_as: Reading):
        '''Drop rules.

        Options:
            limit: Tokens of the text to read; those behind are not.
        '''

Words in brackets at the end say what a default of None stands for. What no docstring says is said
here of options that several commands have, or by ``PlainOptions``, whose first sentences are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from pydantic import ValidationError
from typer.core import TyperGroup
from typer.models import ParameterInfo

from umim_core.config.generation import PlainOptions
from umim_core.config.model_base import SEEDS
from umim_core.errors import (
    ConfigError,
    GenerationError,
    ResourceLimitError,
    UmimError,
    field_rule,
)

AtLeast0 = Annotated[int, typer.Option(min=0)]
AtLeast1 = Annotated[int, typer.Option(min=1)]
AtLeast0OrNone = Annotated[int | None, typer.Option(min=0)]
Seed = Annotated[int, typer.Option(min=0, max=SEEDS - 1)]
MaybeArgument = Annotated[str | None, typer.Argument()]
Checkpoint = Annotated[str | None, typer.Option("--checkpoint", "-c")]
OfFile = Annotated[list[str] | None, typer.Option(metavar="FILE")]
GivenRules = Annotated[Path, typer.Option(show_default=False)]
Page = Annotated[Path | None, typer.Option(dir_okay=False)]
_COMMON: Final = """
    checkpoint: A name that umim path lists, a directory or a hub repository; by default
        umim-smollm2-135m-adapters, or umim-docs-llama where its model cannot be fetched.
    device: cpu, or cuda, cuda:1 and so on (a GPU where there is one).
    dtype: Data type of the backbone; auto: bfloat16 where the device computes it faster, else
        float32; published: that of its weights.
    html: Also write it as an HTML page here.
    model: The frozen model: a name that umim path --part backbone lists, a directory, a .gguf
        file or a hub repository.
    out: Directory to write; by default one under UMIM_ROOT, see umim path.
    protect: Regular expression of tokens that no rule may contain, or digits, capitals, newlines;
        may be repeated.
    rules: Rule directory that umim mine wrote; must be given.
    start: Checkpoint of this model that is trained further, in its own form; spans that it has no
        row for begin with its module alone.
"""
_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_DEFAULT: Final = re.compile(r" \(([^()]*)\)\.?$")


class Commands(TyperGroup):
    """Commands that say in our words what is wrong with an option; typer says it in pydantic's."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                found = error.__cause__.errors(include_url=False)[0]
                rule = field_rule("", found)
                told = found["type"] == "value_error"  # a choice, say: with the value
                error.message = rule if told else str(UmimError(rule, found["input"]))
            raise


def _entries(docstring: str | None) -> dict[str, str]:
    """Return what a docstring says of each parameter or field, in one line."""
    found = _ENTRY.findall(docstring or "")
    return {name: " ".join(words.replace("`", "").split()) for name, words in found}


_PLAIN: Final = {
    name: words.partition(". ")[0] for name, words in _entries(getdoc(PlainOptions)).items()
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function whose signature, and docstring, typer reads as a command."""
    asked = signature(function, eval_str=True).parameters
    groups = {name: one.annotation for name, one in asked.items() if _is_group(one)}

    @wraps(function)
    def flat(context: typer.Context, **given: Any) -> None:
        for name, group in groups.items():
            fields = signature(group).parameters
            given[name] = group(**{field: given.pop(field) for field in fields})
        if "context" in asked:
            given["context"] = context
        try:
            function(**given)
        except (ConfigError, GenerationError, ResourceLimitError) as error:  # others are of files
            typed = flags(context)
            error.reword(_in_flags(error.rule, typed), _in_flags(error.remedy, typed))
            raise

    options = [one for one in _options(function) if one.name != "context"]
    first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    flat.__signature__ = Signature([first, *options])  # type: ignore[attr-defined]  # typer reads it
    words = (getdoc(function) or "").partition("\n\nOptions:")[0]
    flat.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", words)  # a terminal breaks paragraphs
    return flat


def flags(context: typer.Context) -> dict[str, str]:
    """Return how the options of a command are typed, by their names; names of arguments."""
    return {str(option.name): option.opts[0] for option in context.command.params}


def _in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return words that name options as they are typed; those like ``text`` may mean more."""
    names = "|".join(name for name in flags if "_" in name)
    apart = r"""\w/\\'"\-"""  # of paths and in quotes
    shape = rf"(?<![{apart}.])(?:{names})(?![{apart}]|[.:]\w)"
    return re.sub(shape, lambda name: flags[name[0]], text) if names else text


def _is_group(one: Parameter) -> bool:
    return is_dataclass(one.annotation)


def _options(documented: Callable[..., object]) -> Iterator[Parameter]:
    """Yield the parameters of a function or a dataclass as typer takes them."""
    words = _PLAIN | _entries(_COMMON) | _entries(getdoc(documented))
    for one in signature(documented, eval_str=True).parameters.values():
        if _is_group(one):
            yield from _options(one.annotation)
        else:
            yield _option(one, words.get(one.name, "")).replace(kind=Parameter.KEYWORD_ONLY)


def _option(one: Parameter, words: str) -> Parameter:
    """Return a parameter with its words, unless it has some of its own."""
    annotated = get_origin(one.annotation) is Annotated
    kind, *infos = get_args(one.annotation) if annotated else (one.annotation,)
    has_words = isinstance(one.default, ParameterInfo) or (infos and infos[0].help)
    if has_words or not words:
        return one
    if infos:
        info = copy(infos[0])
    elif one.default is Parameter.empty:
        info = typer.Argument()
    else:
        info = typer.Option(*[f"--{one.name.replace('_', '-')}"] * (kind is bool))
    default = _DEFAULT.search(words)
    info.help = f"{words[: default.start()] if default else words.rstrip('.')}."
    if default and one.default is None:
        info.show_default = default[1]
    return one.replace(annotation=Annotated[kind, info])
