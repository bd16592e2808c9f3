"""What the commands of ``umim`` share: the text, the checkpoint and the device they are given."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from umim_core.errors import ConfigError, CorpusError

DEFAULT_CHECKPOINT: Final = "umim-docs-llama"
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", "-c", help="Embedded name, directory or hub repository.")
]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, or cuda (cuda:1 and so on) where there is a GPU.")
]
DtypeOption = Annotated[str, typer.Option(help="Data type of the backbone.")]


def usable_device(asked: str) -> str:
    """Return the device asked for.

    Raises:
        ConfigError: If this machine has no such device.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if asked not in found:
        raise ConfigError(
            f"device must be {', '.join(found) if gpus else 'cpu: there is no usable GPU'}",
            asked,
            "Choose such a device, or leave it out.",
        )
    return asked


def given_text(argument: str | None) -> str:
    """Return the argument, or stdin for "-" or nothing.

    Raises:
        ConfigError: If nothing is given.
        CorpusError: If it is not UTF-8.
    """
    if argument is not None and argument != "-":
        try:
            argument.encode()
        except UnicodeEncodeError as error:  # Python marks bytes that are not UTF-8 so
            raise CorpusError("a text must be UTF-8", str(error), "Convert the text.") from error
        return argument
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("a text must be given", "nothing", "Pass it, or pipe it into stdin.")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CorpusError("stdin must be UTF-8", str(error), "Convert the text.") from error
