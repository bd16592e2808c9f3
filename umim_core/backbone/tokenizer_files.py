"""Reading tokenizers from names, directories and hub repositories; never their code, never torch.

What makes a tokenizer from ``tokenizer.json`` alone is loaded without the rest of transformers, so
that compressing a text takes a second and not the import of a model library.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import BackboneError, did_you_mean
from umim_core.model_sources.gguf_cache import (
    GGUF,
    find_gguf,
    gguf_directory,
    is_bare,
    quantisation,
)
from umim_core.model_sources.model_cache import models_root, packaged_directory
from umim_core.model_sources.packaged_model import PACKAGED

_SETTINGS: Final = "tokenizer_config.json"
_PLAIN: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the same class by two names
_REACH_SECONDS: Final = 3.0


def backbone_names() -> list[str]:
    """Return the names of the backbones that ship with UMIM or come in a package."""
    return [*embedded_names(), *PACKAGED.names()]


def resolve_backbone(name: str, *, local_files_only: bool = False) -> str:
    """Return the directory of a backbone that is a name or a GGUF file, or ``name`` unchanged.

    A packaged one that is not on this machine is fetched, unless only local files may be used; a
    GGUF file is converted once.
    """
    path = embedded_path(name, "backbone")
    if path is None and name in PACKAGED.names():
        path = packaged_directory(name, local_files_only=local_files_only)
    elif path is None and (file := find_gguf(name)) is not None:
        path = gguf_directory(file)
    return name if path is None else str(path)


def quantisation_note(name: str) -> str:
    """Say by what types a GGUF file held the weights of a backbone on this machine, or ""."""
    if not (held := quantisation(Path(resolve_backbone(name)))):
        return ""
    note = "figures of the base model are those of its dequantised weights"
    return f"{name} was quantised ({held}): {note}"


def load_tokenizer(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer by embedded or packaged name, directory or hub repository."""
    where = resolve_backbone(name, local_files_only=local_files_only)
    check_place("tokenizer", name, _SETTINGS, revision, local_files_only)
    try:
        if _is_plain(Path(where)):
            plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(where)
            return plain
        from transformers import AutoTokenizer
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        settings = get_tokenizer_config(
            where, revision=revision, local_files_only=local_files_only, trust_remote_code=False
        )
        refuse_code("tokenizer", name, settings)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            where, revision=revision, local_files_only=local_files_only, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise load_error("tokenizer", name, error) from error
    return tokenizer


def _is_plain(directory: Path) -> bool:
    """Return whether a directory says that its tokenizer is ``tokenizer.json`` and nothing else."""
    try:
        settings = json.loads((directory / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        isinstance(settings, dict)
        and settings.get("tokenizer_class") in _PLAIN
        and "auto_map" not in settings
        and (directory / "tokenizer.json").is_file()
    )


def check_place(
    what: str, name: str, file: str, revision: str | None, local_files_only: bool = False
) -> None:
    """Refuse at once a path that does not exist, and a repository that is nowhere within reach.

    Messages say ``what`` is looked for; ``file`` is one that a cached repository would hold.
    """
    where = resolve_backbone(name, local_files_only=local_files_only)
    if os.path.isdir(where):
        files = sorted(str(path) for path in Path(where).glob(f"*{GGUF}"))
        if files and not Path(where, file).is_file():
            value = f"{name!r}, a folder of {len(files)} GGUF files"
            raise _nowhere(what, value, f"Name the file: {', '.join(files)}.")
        return
    if os.path.exists(name):
        raise _nowhere(what, f"{name!r}, a file", "Name a .gguf file or a model's directory.")
    if _is_path(name):
        put = f"Put it into {models_root()}, or name its path."
        remedy = put if is_bare(name) else "Check the path."
        raise _nowhere(what, f"{name!r}, a path that does not exist", remedy)
    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError as error:
        raise _nowhere(what, repr(name), did_you_mean(name, backbone_names())) from error
    offline = local_files_only or constants.HF_HUB_OFFLINE
    if isinstance(cached, str) or (not offline and _hub_answers()):
        return
    raise _nowhere(
        what,
        f"{name!r}, neither a directory nor downloaded before",
        did_you_mean(name, backbone_names()) or "The hub is out of reach; name a local directory.",
    )


def may_be_repository(name: str) -> bool:
    """Return whether a name can be that of a hub repository, and is not a misspelt known one."""
    try:
        try_to_load_from_cache(name, _SETTINGS)  # it checks the name first
    except HFValidationError:
        return False
    known = backbone_names()
    return not (_is_path(name) or os.path.exists(name) or did_you_mean(name, known))


def _is_path(name: str) -> bool:
    path_like = name.startswith((".", "/", "~", "\\")) or name.endswith(("/", GGUF))
    return path_like or name.count("/") > 1


def _hub_answers() -> bool:
    """Return whether the hub answers; asked once, since the hub's client tries for a minute.

    Behind a proxy nothing is asked: only the client knows how.
    """
    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), _REACH_SECONDS):
            return True
    except OSError:
        return False


def refuse_code(what: str, name: str, settings: Mapping[str, object]) -> None:
    """Refuse what brings code, even where transformers has an implementation of its own."""
    if "auto_map" in settings:
        raise BackboneError(
            f"a {what} must come without code of its own",
            f"{name!r}: auto_map {settings['auto_map']}",
            "Take auto_map out of a local copy if transformers' own implementation is meant.",
        )


def load_error(what: str, name: str, error: Exception) -> BackboneError:
    """Return the error of something that could not be loaded."""
    reason = str(error).strip().splitlines()
    return _nowhere(
        what,
        f"{name!r}: {reason[0] if reason else type(error).__name__}",
        "Check the name; offline machines need a local directory.",
    )


def _nowhere(what: str, value: str, remedy: str) -> BackboneError:
    return BackboneError(
        f"a {what} must be a known name ({', '.join(backbone_names())}), a .gguf file, a directory "
        "with safetensors weights, or a reachable hub repository without code of its own",
        value,
        remedy,
    )
