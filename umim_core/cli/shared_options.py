"""Options that several ``umim`` commands have, and checks of what they are given."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import BaseModel

from umim_core.cli.console_output import emit, log_lines
from umim_core.config.form import PAPER, Merge, ModuleForm
from umim_core.config.generation import PlainOptions
from umim_core.config.model_base import AnyModel
from umim_core.encodable import encoding_error
from umim_core.errors import ConfigError, CorpusError, require

if TYPE_CHECKING:
    from umim_core.checkpoint.checkpoint_index import OwnPlace
    from umim_core.config.recipe import DistillConfig
    from umim_core.model.umim import UMIM

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        help="A name that umim path lists, a directory or a hub repository; by default "
        "umim-smollm2-135m-adapters, or umim-docs-llama where its model cannot be fetched.",
    ),
]
HtmlOption = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Also write it as an HTML page here.")
]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, or cuda (cuda:1 and so on) where there is a GPU.")
]
PlaceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda; without it, a GPU where there is one.")
]
TrainDeviceOption = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Where the model runs; without it, a GPU where there is one."),
]
TrainSeedOption = Annotated[int, typer.Option(min=0, help="Of weights and data order.")]
StartOption = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint of this model that is trained further, in its own form; spans that it "
        "has no row for begin with its module alone."
    ),
]
LogKindOption = Annotated[
    Literal["text", "jsonl"] | None, typer.Option(help="What files hold whose ending is other.")
]
ProtectOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Regular expression of tokens that no rule may contain, or digits, capitals, "
        "newlines; may be repeated."
    ),
]


@dataclass(frozen=True)
class CorpusOptions:
    """How texts are read: fields of ``text.sources.Reading``."""

    kind: Annotated[
        Literal["text", "jsonl", "parquet", "dataset", "ids"] | None,
        typer.Option(help="What the names hold; by default as their endings say."),
    ] = None
    field: Annotated[
        str | None,
        typer.Option(help="Text field of JSONL, parquet, data sets.", show_default="text"),
    ] = None
    split: Annotated[
        str | None,
        typer.Option(help="Split of a data set.", show_default="train; umim ppl: test"),
    ] = None
    config: Annotated[str | None, typer.Option(help="Configuration of a data set.")] = None
    max_bad: Annotated[
        int | None,
        typer.Option(min=0, help="Unusable rows to skip before giving up.", show_default="0"),
    ] = None


SEGMENT_LENGTH: Final = 512  # tokens, where a rule set does not say
FORM: Final = {"module_positions": "learned", "residual": "last", "adapter_rank": 8}
_VALIDATIONS: Final = 4
_SAVED: Final = 10  # steps at most between two states to go on from


def of_options(name: str, *flags: str, default: str = "", least: float | None = None) -> Any:
    """Return the option of a field of ``PlainOptions``: the first sentence on it, and its default.

    ``top_k: Keep the k most probable tokens (50). None ...`` has the default 50 where the one given
    is none.
    """
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", getdoc(PlainOptions) or "", re.MULTILINE)
    sentence = " ".join(dict(entries).get(name, "").replace("`", "").split()).partition(". ")[0]
    words, _, value = re.sub(r" \(([^()]*)\)\.?$", "|\\1", sentence.rstrip(".")).partition("|")
    shown = ", else ".join(filter(None, (default, value)))
    return typer.Option(*flags, help=f"{words}.", show_default=shown or False, min=least)


MergeOption = Annotated[Merge | None, of_options("merge", default="the checkpoint's")]
RawTailOption = Annotated[
    int | None,
    of_options("raw_tail", default="the checkpoint's with its own --merge, else 0", least=0),
]
RolesOption = Annotated[
    list[str] | None, of_options("roles", "--role", default="the checkpoint's, else user")
]
DtypeOption = Annotated[
    Literal["auto", "published", "bfloat16", "float16", "float32", "float64"],
    typer.Option(
        help="Data type of the backbone; auto: bfloat16 where the device computes it faster, else "
        "float32; published: that of its weights.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """A checkpoint, which of its rules merge, and its model's data type."""

    checkpoint: CheckpointOption = None
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Merge by rules of at most so many nats per saved token, as umim prune measured "
            "them; inf for all rules.",
            show_default="the checkpoint's own budget, if it has one",
        ),
    ] = None
    target_tr: Annotated[
        float | None,
        typer.Option(
            help="Merge by the cheapest rules that save this share of tokens, as umim prune "
            "measured it; in place of --budget.",
        ),
    ] = None
    dtype: DtypeOption = "auto"

    @property
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


def of_field(model: type[BaseModel], name: str, default: object = ..., *flags: str) -> Any:
    """Return the option of a configuration's field: its words, perhaps its default.

    Its bounds are checked by the configuration.
    """
    field = model.model_fields[name]
    words = (field.description or "").replace(" null: ", " Without: ")
    chosen = field.default if default is ... else default
    shown = field.default is not None and (chosen is not None or str(field.default))
    return typer.Option(chosen, *flags, help=words, show_default=shown)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of its groups one by one, as typer wants them.

    A group is a dataclass whose fields are options; a command has it as one parameter.
    """
    parameters, groups = list[Parameter](), dict[str, type[Any]]()
    for one in signature(command, eval_str=True).parameters.values():
        if not is_dataclass(one.annotation):
            parameters.append(one)
            continue
        group: Any = one.annotation
        groups[one.name] = group
        parameters += signature(group, eval_str=True).parameters.values()

    @wraps(command)
    def flat(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{one.name: options.pop(one.name) for one in fields(group)})
        command(**options)

    named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters]
    flat.__signature__ = Signature(named)  # type: ignore[attr-defined]  # which typer reads
    return flat


def of_context(
    context: typer.Context, model: type[AnyModel], other: Mapping[str, object]
) -> AnyModel:
    """Return a configuration of the command's options that have its names, and of others."""
    from umim_core.config.model_base import validated

    named = ((name, context.params.get(name)) for name in model.model_fields)
    given = {name: value for name, value in named if value is not None}
    return validated(model, {**given, **other}, "the options")


def of_training(
    context: typer.Context,
    form: Mapping[str, object],
    longest: int,
    *,
    apart: int,
    rows: int,
    patience: int,
) -> tuple[DistillConfig, ModuleForm, str | None]:
    """Return how the command's options train which form, and the checkpoint that it starts from.

    So many rows are validated four times, or more often where that is ``apart`` steps or fewer.
    A checkpoint that is trained further keeps its form, and its ``longest`` rules.
    """
    from umim_core.config.recipe import DistillConfig

    steps: int = context.params["steps"]
    every = max(1, min(apart, steps // _VALIDATIONS))
    plan = {"max_steps": steps, "max_epochs": 1000, "validate_every": every, "patience": patience}
    plan |= {"validation_rows": rows, "checkpoint_every": min(every, _SAVED)}
    asked = of_context(context, ModuleForm, {"kind": PAPER, **form})  # --kind is of the text
    training = of_context(context, DistillConfig, plan)
    if context.params["start"] is None:
        return training, asked, None
    from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
    from umim_core.rules.ruleset import RuleSet
    from umim_core.training.train_job import check_longest_of_start

    start = resolve_checkpoint(context.params["start"])
    kept = read_config(start).alone()
    named = given(context, set(ModuleForm.model_fields) - {"kind"})
    other = [f"{name} {value}" for name, value in named.items() if value != getattr(kept, name)]
    remedy = "Leave out the options of the form, or --start."
    rule = "a module that is trained further keeps its form"
    require(not other, ConfigError, rule, ", ".join(other), remedy)
    check_longest_of_start(RuleSet.load(start / "rules").longest, longest)
    return training, kept, str(start)


def given(context: typer.Context, names: Collection[str]) -> dict[str, object]:
    """Return those of some options that are on the command line, by name."""
    return {
        name: value
        for name, value in context.params.items()
        if name in names
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def on_gpu(device: Literal["cpu", "cuda"] | None) -> bool:
    """Return whether a training runs on a GPU: on the one that is asked for, or that is there."""
    from umim_core.backbone.devices import default_device, usable_device

    return (default_device() if device is None else usable_device(device)) == "cuda"


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


def write_page(path: Path, title: str, body: str) -> None:
    from umim_core.model.showing import html_page
    from umim_core.store.disk import write_bytes

    write_bytes(path, html_page(title, body).encode())


def refuse_named(context: typer.Context, names: Collection[str], rule: str) -> None:
    """Refuse options on the command line that the others leave without effect."""
    flags = {option.name: option.opts[0] for option in context.command.params}
    refuse_ignored({flags[n]: value for n, value in given(context, names).items()}, rule)


def refuse_ignored(options: Mapping[str, object], rule: str) -> None:
    """Refuse options that would be ignored; None, False and nothing are not given."""
    refused = [
        f"{name} {value}"
        for name, value in options.items()
        if value not in (None, []) and value is not False
    ]
    names = " and ".join(options)
    require(not refused, ConfigError, f"{names} {rule}", ", ".join(refused), "Leave them out.")
