"""``umim path``: directories of checkpoints and backbones by name, and of lm-eval's tasks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from umim_core.checkpoint.checkpoint_files import named_config
from umim_core.checkpoint.checkpoint_index import artifact_root, own_checkpoint, own_checkpoints
from umim_core.checkpoint.next_steps import TASKS_FOLDER
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.cli.documented import AtLeast1, MaybeArgument
from umim_core.embedded.assets import Asset, embedded_names, embedded_path
from umim_core.errors import ConfigError, did_you_mean, look_up, require
from umim_core.model_sources.packaged_model import PACKAGED, PackagedModel


def path(
    context: typer.Context,
    name: MaybeArgument = None,
    part: Asset = "checkpoint",
    tasks: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the directory of a checkpoint or backbone, or list all by name.

    Licence and origin of a packaged model are printed on stderr, and are fields with --json.

    Options:
        name: A name, or the first digits of a stage's key; all if left out.
        part: Which directory.
        tasks: Print the folder for lm-eval's --include_path.
    """
    if tasks:
        rule = "must be left out with --tasks"
        shared.refuse_ignored({"NAME": name}, rule)
        shared.refuse_named(context, ("part",), rule)
        emit({"tasks": str(TASKS_FOLDER)}, [str(TASKS_FOLDER)], as_json)
        return
    if name is None:
        paths = {known: str(place) for known, place in _all(part).items()}
        width = max(map(len, paths), default=0)
        lines = [f"{known:<{width}}  {place}" for known, place in paths.items()]
        emit({"part": part, "paths": paths}, lines, as_json)
        return
    place = _place(name, part)
    document: dict[str, object] = {"name": name, "part": part, "path": str(place)}
    if part == "backbone" and name in PACKAGED:
        model = PACKAGED[name]
        document |= {"licence": model.licence, "origin": model.origin}
        if not as_json:
            typer.echo(f"{model.licence}; {model.origin}", err=True)
    emit(document, [str(place)], as_json)


def _all(part: Asset) -> dict[str, Path]:
    """Return what is on this machine."""
    shipped = {name: embedded_path(name, part) for name in embedded_names(part)}
    places = {name: place for name, place in shipped.items() if place is not None}
    if part == "checkpoint":
        return places | own_checkpoints()
    from umim_core.model_sources.model_cache import model_directory, model_fault

    fetched = (model for model in PACKAGED.values() if model_fault(model) is None)
    return places | {model.name: model_directory(model) for model in fetched}


def _place(name: str, part: Asset) -> Path:
    place = embedded_path(name, part)
    if place is None and part == "checkpoint":
        place = own_checkpoint(name)
    if place is None and part == "backbone" and name in PACKAGED:
        from umim_core.model_sources.model_cache import packaged_directory

        place = packaged_directory(name, local_files_only=True)
    if place is None:
        known = _all(part)
        others = f"Others are looked for under {artifact_root()}."
        if part == "backbone":
            others = "Other models are named by directory, .gguf file or hub repository."
        remedy = did_you_mean(name, known) or others
        if part == "checkpoint" and name in PACKAGED:
            remedy = "It is a backbone: add --part backbone."
        elif (made := embedded_path(name, "checkpoint") or own_checkpoint(name)) is not None:
            model = named_config(made).backbone
            remedy = f"It is a checkpoint, of the backbone {model}."
        raise ConfigError(f"a name must be one of {', '.join(known)}", name, remedy)
    rule = f"{name} must hold a {part}"
    remedy = "Make it again, or install it again."
    require(place.is_dir(), ConfigError, rule, f"none at {place}", remedy)
    return place


def baselines(as_json: JsonFlag = False) -> None:
    """List the baselines: token reducers, pooled embeddings, KV cache policies.

    Methods of the prompt save prefill and KV cache, those of the cache save KV cache alone.
    """
    from umim_core.baselines.registry import BASELINES

    listed = [{"name": name, "side": x.side, "line": x.line} for name, x in BASELINES.items()]
    width = max(map(len, BASELINES))
    lines = ["{name:<{width}}  {side:<6}  {line}".format(**row, width=width) for row in listed]
    emit({"baselines": listed}, lines, as_json)


def task_text(
    name: str,
    tokenizer: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option()],
    questions: AtLeast1 = 100,
    as_json: JsonFlag = False,
) -> None:
    """Write prompts of a task's training split, to mine rules from and to train on.

    The split is drawn apart from the scored one. Each line holds one prompt with its answers as
    `text`.

    Options:
        name: A generated task, e.g. umim_ruler_4k.
        tokenizer: The backbone, or its tokenizer's directory.
        out: File of JSON lines to write; must not exist.
        questions: Prompts to write.
    """
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.store.disk import check_writable, write_rows
    from umim_core.store.publication import check_absent
    from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows

    check_absent(out, "file")
    check_writable(out)
    task = GENERATION_TASKS.find(name)
    options = TaskOptions(task_questions=questions)
    rows = make_rows(task, options, load_tokenizer(tokenizer), "train")
    parts = [(row["prompt"], row["answer_prefix"], ", ".join(row["references"])) for row in rows]
    write_rows(out, [{"text": " ".join(filter(None, texts))} for texts in parts])
    count = sum(row["prompt_tokens"] for row in rows)
    mine = ["umim", "mine", str(out), "--kind", "jsonl", "--tokenizer", tokenizer, "--out", "rules"]
    lines = [f"{len(rows)} texts, {count:,} tokens: {out}", f"Next: {shlex.join(mine)}"]
    emit({"task": name, "texts": len(rows), "tokens": count, "out": str(out)}, lines, as_json)


def fetch(name: MaybeArgument = None, verify: bool = False, as_json: JsonFlag = False) -> None:
    """Fetch a packaged model by pip and convert it, or list all with their state.

    Options:
        name: A packaged model; all are listed if left out.
        verify: Hash every file of a model that is here already.
    """
    if name is None:
        documents = [_document(model, verify) for model in PACKAGED.values()]
        emit({"models": documents}, [line for d in documents for line in _lines(d)], as_json)
        return
    from umim_core.checkpoint.next_steps import after_fetching
    from umim_core.model_sources.model_cache import fetch_model

    model = look_up(PACKAGED, name, "a packaged model", "`umim fetch` lists them.")
    fetch_model(model, verify=verify)
    document = _document(model, verify=False)
    emit(document, [*_lines(document), *after_fetching(name)], as_json)


def _document(model: PackagedModel, verify: bool) -> dict[str, Any]:
    from umim_core.model_sources.model_cache import model_directory, model_fault

    directory = model_directory(model)
    state = "absent" if not directory.is_dir() else "damaged"
    said = ("licence", "origin", "description", "wheel_bytes", "model_bytes")
    return {
        "name": model.name,
        "state": "here" if model_fault(model, verify=verify) is None else state,
        "directory": str(directory),
        "package": f"{model.distribution}=={model.version}",
        **{field: getattr(model, field) for field in said},
    }


def _lines(document: dict[str, Any]) -> list[str]:
    name, state = document["name"], document["state"]
    remedy = "" if state == "here" else f": run umim fetch {name}"
    wheel, converted = (f"{document[f'{kind}_bytes'] / 1e6:.0f} MB" for kind in ("wheel", "model"))
    size = f"{converted} in single precision ({wheel} as {document['package']})"
    named = ("description", "directory", "licence", "origin")
    lines = [f"  {key:<11} {document[key]}" for key in named]
    return [f"{name} ({state}{remedy})", *lines, f"  {'size':<11} {size}"]
