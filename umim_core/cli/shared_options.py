"""Options that several ``umim`` commands have, and checks of what they are given."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import BaseModel

from umim_core.cli.console_output import emit, log_lines
from umim_core.cli.documented import Checkpoint, flags
from umim_core.config.form import PAPER, Merge, ModuleForm
from umim_core.config.model_base import AnyModel
from umim_core.encodable import encoding_error
from umim_core.errors import ConfigError, CorpusError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from umim_core.checkpoint.checkpoint_index import OwnPlace
    from umim_core.config.rule_options import RuleOptions
    from umim_core.model.umim import UMIM
    from umim_core.training.train_job import TrainJob

SEGMENT_LENGTH: Final = 512  # tokens, where a rule set does not say
FORM: Final = {"module_positions": "learned", "residual": "last", "adapter_rank": 8}
_VALIDATIONS: Final = 4
_SAVED: Final = 10  # steps at most between two states to go on from


Dtype = Literal["auto", "published", "bfloat16", "float16", "float32", "float64"]


@dataclass(frozen=True)
class ModelOptions:
    """A checkpoint, which of its rules merge, and its model's data type.

    Attributes:
        budget: Merge by rules of at most so many nats per saved token, as umim prune measured them;
            inf for all rules (the checkpoint's own budget, if it has one).
        target_tr: Merge by the cheapest rules that save this share of tokens, as umim prune
            measured it; in place of --budget.
    """

    checkpoint: Checkpoint = None
    budget: Annotated[float | None, typer.Option(min=0.0)] = None
    target_tr: float | None = None
    dtype: Dtype = "auto"

    @cached_property
    def name(self) -> str:
        from umim_core.checkpoint.checkpoint_files import default_checkpoint

        return default_checkpoint() if self.checkpoint is None else self.checkpoint

    def load(self, device: str, merge: Merge | None = None) -> UMIM:
        """Load the checkpoint, the default one where none is named, for rules that are used."""
        if merge == "none":
            chosen = {"--budget": self.budget, "--target-tr": self.target_tr}
            refuse_ignored(chosen, "choose what merges")
        from umim_core.model.umim import UMIM

        return UMIM.from_pretrained(
            self.name,
            dtype=self.dtype,
            device=device,
            budget=self.budget,
            target_tr=self.target_tr,
        )


def of_field(model: type[BaseModel], name: str, default: object = ..., *flags: str) -> Any:
    """Return the option of a configuration's field: its words, perhaps its default.

    Its bounds are checked by the configuration.
    """
    field = model.model_fields[name]
    words = (field.description or "").replace(" null: ", " Without: ")
    chosen = field.default if default is ... else default
    shown = field.default is not None and (chosen is not None or str(field.default))
    return typer.Option(chosen, *flags, help=words, show_default=shown)


def of_context(
    context: typer.Context, model: type[AnyModel], other: Mapping[str, object]
) -> AnyModel:
    """Return a configuration of the command's options that have its names, and of others."""
    from umim_core.config.model_base import validated

    named = ((name, context.params.get(name)) for name in model.model_fields)
    given = {name: value for name, value in named if value is not None}
    try:
        return validated(model, {**given, **other})
    except ConfigError as error:  # begins with a field's name, and a place in a list
        typed = flags(context)
        rule = re.sub(r"^(\w+)(\.\d+)?", lambda at: typed.get(at[1], at[0]), error.rule)
        error.reword(rule, error.remedy)
        raise


def training_job(
    context: typer.Context,
    form: Mapping[str, object],
    longest: int,
    *,
    max_tokens: int,
    apart: int,
    rows: int,
    patience: int,
) -> TrainJob:
    """Return how the command's options train which form of its model.

    So many rows are validated four times, or more often where that is ``apart`` steps or fewer.
    A checkpoint that is trained further keeps its form, and its ``longest`` rules.
    """
    from umim_core.backbone.devices import default_device, usable_device
    from umim_core.backbone.shape import check_row_length, configured_number, trained_context
    from umim_core.checkpoint.checkpoint import check_depth
    from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
    from umim_core.config.recipe import DistillConfig
    from umim_core.rules.ruleset import RuleSet
    from umim_core.training.train_job import TrainJob, check_longest_of_start

    options = context.params
    every = max(1, min(apart, options["steps"] // _VALIDATIONS))
    plan = {"max_steps": options["steps"], "max_epochs": 1000, "validate_every": every}
    plan |= {"validation_rows": rows, "patience": patience, "checkpoint_every": min(every, _SAVED)}
    asked = of_context(context, ModuleForm, {"kind": PAPER, **form})  # --kind is of the text
    device, start = options["device"], options["start"]
    remedy = f"Lower {'max_tokens' if 'max_tokens' in options else 'segment_length'}."
    check_row_length(max_tokens, trained_context(options["model"]), options["model"], remedy)
    job = TrainJob(
        backbone=from_anywhere(options["model"]),
        rules=None,
        config=of_context(context, DistillConfig, plan),
        max_tokens=max_tokens,
        form=asked,
        seed=options["seed"],
        use_gpu=(usable_device(device) if device else default_device()) == "cuda",
    )
    if start is None:
        layers = configured_number("num_hidden_layers", options["model"])
        if layers is not None:  # before anything is tokenized
            check_depth(asked.merge_depth, layers)
        return job
    begin = resolve_checkpoint(start)
    kept = read_config(begin).alone()
    named = given(context, set(ModuleForm.model_fields) - {"kind"})
    other = [f"{name} {value}" for name, value in named.items() if value != getattr(kept, name)]
    remedy = "Leave out the options of the form, or --start."
    rule = "a module that is trained further keeps its form"
    require(not other, ConfigError, rule, ", ".join(other), remedy)
    check_longest_of_start(RuleSet.load(begin / "rules").longest, longest)
    return replace(job, form=kept, start=str(begin))


def given(context: typer.Context, names: Collection[str]) -> dict[str, object]:
    """Return those of some options that are on the command line, by name."""
    return {
        name: value
        for name, value in context.params.items()
        if name in names
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def given_text(argument: str | None) -> str:
    """Return the argument, or stdin for "-" or nothing."""
    if argument is not None and argument != "-":
        found = encoding_error(argument)  # so Python marks other bytes
        require(found is None, CorpusError, "a text must be UTF-8", found, "Convert the text.")
        return argument
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("a text must be given", "nothing", "Pass it, or pipe it into stdin.")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError("stdin must be UTF-8", str(error), "Convert the text.") from error


@dataclass(frozen=True)
class Base:
    """The model of a checkpoint, of which no weights are read."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    positions: int | None  # None: not bounded, or not known
    rules: RuleOptions  # how the checkpoint's rules were mined


def base_of(checkpoint: str) -> Base:
    """Return what a corpus is checked against: in seconds, however large the model."""
    from umim_core.backbone.shape import trained_context
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
    from umim_core.model.hub import fetch_checkpoint
    from umim_core.rules.ruleset import RuleSet

    place = resolve_checkpoint(fetch_checkpoint(checkpoint))
    config = read_config(place)
    name, revision = config.backbone, config.backbone_revision
    tokenizer, positions = load_tokenizer(name, revision=revision), trained_context(name, revision)
    return Base(name, tokenizer, positions, RuleSet.load(place / "rules").options)


def text_of(path: Path, option: str) -> str:
    """Return the text of a file that an option names."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        rule = f"{option} must be a readable file of UTF-8 text"
        raise ConfigError(rule, str(error), "Check the path.") from error


def from_anywhere(name: str) -> str:
    """Return a name, of a file or folder its whole path: it is read from other folders, too."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def given_rules(rules: Path) -> None:
    """Refuse what is no rule directory, before anything heavy is imported."""
    named = "nothing" if rules == Path() else str(rules)
    remedy = "Make one: umim mine FILE... --tokenizer MODEL --out DIR."
    known = (rules / "rules.parquet").is_file()
    require(known, ConfigError, "--rules must be a rule directory", named, remedy)


def emit_checkpoint(
    place: OwnPlace,
    checkpoint: Path,
    document: Mapping[str, object],
    lines: Sequence[str],
    as_json: bool,
    further: Sequence[str] = (),
    *,
    to_serve: bool = False,
) -> None:
    """Name a checkpoint that was made, and print what it is and how to use, or serve, it."""
    from umim_core.checkpoint.next_steps import after_making

    name = place.record(checkpoint)
    made = after_making(checkpoint, name, place.directory, to_serve=to_serve)
    shown = [*lines, *made, *further]
    emit({"checkpoint": str(checkpoint), "name": name, **document}, shown, as_json)


@contextmanager
def resumable() -> Iterator[None]:
    """Say how a command that keeps states goes on; it ends with 130 at Ctrl-C and TERM."""
    from umim_core.store.locking import computing

    log_lines("umim.progress")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        with computing():
            yield
    except KeyboardInterrupt:
        typer.echo("\nStopped; the same command goes on from the last state.", err=True)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def check_page(path: Path | None) -> None:
    """Refuse a page that exists or cannot be written, before the work that it shows."""
    from umim_core.store.disk import check_writable
    from umim_core.store.publication import check_absent

    if path is not None and (path.is_file() or not os.path.lexists(path)):  # no device
        check_absent(path, "file")
        check_writable(path)


def write_page(path: Path, title: str, body: str) -> None:
    from umim_core.model.showing import html_page
    from umim_core.store.disk import write_bytes

    write_bytes(path, html_page(title, body).encode())


def refuse_named(context: typer.Context, names: Collection[str], rule: str) -> None:
    """Refuse options on the command line that the others leave without effect."""
    typed = flags(context)
    refuse_ignored({typed[n]: value for n, value in given(context, names).items()}, rule)


def refuse_ignored(options: Mapping[str, object], rule: str) -> None:
    """Refuse options that would be ignored; None, False and nothing are not given."""
    refused = [
        f"{name} {value}"
        for name, value in options.items()
        if value not in (None, []) and value is not False
    ]
    names = " and ".join(options)
    remedy = "Leave it out." if len(refused) == 1 else "Leave them out."
    require(not refused, ConfigError, f"{names} {rule}", ", ".join(refused), remedy)
