"""Tokenizers from names, directories and hub repositories, and what they are known by again.

Neither their code is run nor torch imported.

What makes a tokenizer from ``tokenizer.json`` alone is loaded without the rest of transformers, so
that compressing a text takes a second and not the import of a model library.
"""

from __future__ import annotations

import json
import math
import os
import socket
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.addresses import beside, check_path, is_address, is_path, redacted
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import (
    ArtifactError,
    BackboneError,
    UmimError,
    did_you_mean,
    require,
    translated,
)
from umim_core.model_sources.gguf_conversion import quantisation
from umim_core.model_sources.model_cache import (
    GGUF,
    find_gguf,
    gguf_directory,
    is_bare,
    models_root,
    packaged_directory,
)
from umim_core.model_sources.packaged_model import PACKAGED
from umim_core.store.artifacts import json_digest, sha256_bytes, sha256_file
from umim_core.store.disk import refusals_named, unwritable
from umim_core.store.user_cache import SHA256, remembered
from umim_core.text.token_ids import is_panic

_SETTINGS: Final = "tokenizer_config.json"
_PLAIN: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the same class by two names
_REACH_SECONDS: Final = 3.0
_MOST_BYTES: Final = 1 << 26  # of a file that is no weights; Gemma's tokenizer.json has 33 MB
_READ_WHOLE: Final = (".json", ".jinja", ".txt", ".model")
_PUT_IN: Final = ("content", "prepend", "replacement")
_MOST_IDS: Final = 1 << 22
_MOST_GROWTH: Final = 64  # characters that a tokenizer may make of one
_PROBE_CHARS: Final = 32  # of one kind; a search that doubles with each is given up by the library
_PROBE_SECONDS: Final = 2.0
_LARGE: Final = 1 << 20  # characters of a tokenizer's JSON: reading and writing it takes 0.2 s
# What transformers and its helpers raise on files that were not written by them.
FOREIGN_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


def backbone_names() -> list[str]:
    return [*embedded_names(), *PACKAGED]


def resolve_backbone(name: str, *, local_files_only: bool = False) -> str:
    """Return the directory of a backbone that is a name or a GGUF file, or ``name`` unchanged.

    A packaged one that is not on this machine is fetched, unless only local files may be used; a
    GGUF file is converted once.
    """
    if is_address(name) or ("@" in name and not os.path.exists(name)):
        shown = redacted(name if is_address(name) else f"x://{name}").removeprefix("x://")
        raise _nowhere("backbone", repr(shown), "Name no address, user or password.")
    path = embedded_path(name, "backbone")
    if path is None and name in PACKAGED:
        path = packaged_directory(name, local_files_only=local_files_only)
    elif path is None and (file := find_gguf(name)) is not None:
        path = gguf_directory(file)
    return name if path is None else str(path)


def quantisation_note(name: str) -> str:
    """Say by what types a GGUF file held the weights of a backbone on this machine, or ""."""
    if not (types := quantisation(Path(resolve_backbone(name)))):
        return ""
    note = "figures of the base model are those of its dequantised weights"
    return f"{name} was quantised ({types}): {note}"


def load_tokenizer(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    where = check_place("tokenizer", name, _SETTINGS, revision, local_files_only)
    foreign = where == name  # others were checked when they were made
    with typed_errors("tokenizer", name):
        known = foreign and _check_pipeline(name, revision)
        tokenizer = _load_tokenizer(name, where, revision, local_files_only)
        if foreign and not known:
            _check_pipeline(name, revision)
        if foreign:
            _probe(tokenizer)
    return tokenizer


def _load_tokenizer(
    name: str, where: str, revision: str | None, local_files_only: bool
) -> PreTrainedTokenizerBase:
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
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a tokenizer's files; what the disk refuses of them is an error of their folder.

    The library of tokenizers raises a bare Exception, which no ``except`` should name.
    """

    def typed(error: BaseException) -> ArtifactError | None:
        bare = type(error) is Exception
        return unwritable(directory / "tokenizer.json", 0, OSError(str(error))) if bare else None

    with refusals_named(directory), translated(typed):
        tokenizer.save_pretrained(directory)


def typed_errors(what: str, name: str) -> translated:
    """Raise what a library makes of files that it cannot use as one error that names them."""

    def typed(error: BaseException) -> BackboneError | None:
        if isinstance(error, UmimError) or type(error).__name__ == "OutOfMemoryError":
            return None  # torch's, of a GPU: not the file's fault
        # The library of tokenizers is of Rust: it raises Exception itself, and panics.
        of_tokenizers = type(error) is Exception or is_panic(error)
        foreign = of_tokenizers or isinstance(error, FOREIGN_ERRORS)
        remedy = beside(name) or "Check the name; offline machines need a local directory."
        return _nowhere(what, f"{name!r}: {first_line(error)}", remedy) if foreign else None

    return translated(typed)


def _check_pipeline(name: str, revision: str | None) -> bool:
    """Refuse a ``tokenizer.json`` that would take minutes or gigabytes; False: there is none."""
    file = local_file(name, "tokenizer.json", revision)
    if file is None:
        return False
    pipeline = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = pipeline["model"]["vocab"]
    ids = [token["id"] for token in pipeline.get("added_tokens") or ()]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    if ids and max(ids) >= _MOST_IDS:
        raise ValueError(f"ids of tokens must be below {_MOST_IDS:,}, got {max(ids):,}")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(pipeline.get(part))) > _MOST_GROWTH:
            raise ValueError(f"the {part} makes {growth:,} characters of one")
    return True


def local_file(name: str, file: str, revision: str | None) -> Path | None:
    """Return a file of a directory, or of a repository in the hub's cache; None without it."""
    found: object = os.path.join(name, file)
    if not os.path.isdir(name):
        found = try_to_load_from_cache(name, file, revision=revision)
    return Path(found) if isinstance(found, str) and os.path.isfile(found) else None


def _growth(part: object) -> int:
    """Return how many characters a part of a tokenizer may make of one, by what it puts in."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    added = [value for key, value in part.items() if key in _PUT_IN and isinstance(value, str)]
    return math.prod([max(1, len(text)) for text in added]) * _growth(list(part.values()))


def _probe(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse regular expressions that take a time that doubles with each character."""
    begin = time.monotonic()
    tokenizer("a", verbose=False)  # with the special tokens of its template
    for char in string.printable:
        tokenizer(char * _PROBE_CHARS + "\0", add_special_tokens=False, verbose=False)
        if time.monotonic() - begin > _PROBE_SECONDS:
            raise ValueError(f"a text of {_PROBE_CHARS} times {char!r} takes seconds")


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
) -> str:
    """Return where a name leads to, as :func:`resolve_backbone` does.

    A path that does not exist is refused at once, and a repository that is nowhere within reach.
    Messages say ``what`` is looked for; ``file`` is one that a cached repository would hold.
    """
    where = resolve_backbone(name, local_files_only=local_files_only)
    if os.path.isdir(where):
        check_files(what, Path(where))
        files = sorted(str(path) for path in Path(where).glob(f"*{GGUF}"))
        if files and not Path(where, file).is_file():
            value = f"{name!r}, a folder of {len(files)} GGUF files"
            raise _nowhere(what, value, f"Name the file: {', '.join(files)}.")
        return where
    if os.path.exists(name):
        raise _nowhere(what, f"{name!r}, a file", "Name a .gguf file or a model's directory.")
    if (checkpoint := embedded_path(name, "checkpoint")) is not None:
        model = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["backbone"]
        raise _nowhere(what, f"{name!r}, a checkpoint", f"Name its model, {model}.")
    if is_bare(name):
        value = f"{name!r}, a file that does not exist"
        raise _nowhere(what, value, f"Put it into {models_root()}, or name its path.")
    check_path(what, name, BackboneError)
    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError as error:
        raise _nowhere(what, repr(name), did_you_mean(name, backbone_names())) from error
    offline = local_files_only or constants.HF_HUB_OFFLINE
    if isinstance(cached, str) or (not offline and _hub_answers()):
        return where
    raise _nowhere(
        what,
        f"{name!r}, neither a directory nor downloaded before",
        did_you_mean(name, backbone_names())
        or beside(name)
        or "The hub is out of reach; name a local directory.",
    )


def check_files(what: str, directory: Path) -> None:
    """Refuse pipes and devices, which would be waited for, and files too large to be read whole."""
    for path in directory.iterdir():
        if not path.is_dir() and not path.is_file():
            raise _nowhere(what, f"{path}, no regular file", "Remove it.")
        if path.suffix in _READ_WHOLE and (size := path.stat().st_size) > _MOST_BYTES:
            raise _nowhere(what, f"{path} of {size:,} bytes", f"At most {_MOST_BYTES:,} are read.")


def may_be_repository(name: str) -> bool:
    """Return whether a name can be that of a hub repository, and is not a misspelt known one."""
    try:
        try_to_load_from_cache(name, _SETTINGS)  # it checks the name first
    except HFValidationError:
        return False
    known = backbone_names()
    return not (is_path(name) or os.path.exists(name) or did_you_mean(name, known))


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
    rule = f"a {what} must come without code of its own"
    value = f"{name!r}: auto_map {settings.get('auto_map')}"
    remedy = "Take auto_map out of a local copy if transformers' own implementation is meant."
    require("auto_map" not in settings, BackboneError, rule, value, remedy)


def first_line(error: BaseException) -> str:
    """Return what an error says in a line, with the next one where the first ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    count = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:count]) or type(error).__name__


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens.

    They are those with a role (end, padding ...) and every added token that is flagged special, as
    the marks of a chat's turns are.
    """
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(int(i) for i in flagged.union(tokenizer.all_special_ids))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, without: object = None) -> str:
    """Return the SHA-256 of what decides which ids a text gets.

    It covers vocabulary, merges, normaliser, pre-tokenizer and added tokens; padding, truncation
    and the chat template are left out. Tokenizers of one size with different vocabularies differ.
    An added token that is named ``without`` is left out, too: many add one for padding, to train in
    batches; it decides about no text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: object = {
            "vocab": tokenizer.get_vocab(),
            "class": type(tokenizer).__name__,
            "special": tokenizer.all_special_tokens,
        }
        return json_digest(state)
    text = backend.to_str()
    if len(text) < _LARGE:
        return json_digest(_pipeline(text, without))
    key = [repr(without), sha256_bytes(text.encode())]
    return remembered("tokenizers", key, SHA256, lambda: json_digest(_pipeline(text, without)))


def _pipeline(text: str, without: object) -> dict[str, object]:
    pipeline: dict[str, object] = json.loads(text)
    ignored = ("padding", "truncation", "post_processor")
    state = {name: part for name, part in pipeline.items() if name not in ignored}
    added = pipeline.get("added_tokens")
    if isinstance(added, list):
        state["added_tokens"] = [token for token in added if token["content"] != without]
    return state


def backbone_identity(name: str, revision: str | None) -> str:
    """Return what tells one version of a backbone from another, without loading it.

    For a hub repository it is the commit, else the SHA-256 of configuration and weights, which of
    a packaged model are known before it is fetched.
    """
    if name in PACKAGED:
        return _identity(PACKAGED[name].files)
    directory = Path(check_place("backbone", name, "config.json", revision))
    if directory.is_dir():
        files = [*directory.glob("config.json"), *directory.glob("*.safetensors")]
        return _identity({path.name: sha256_file(path) for path in files})
    try:
        snapshot = snapshot_download(name, revision=revision, allow_patterns=["config.json"])
    except (OSError, ValueError) as error:
        rule = "a backbone must be a known name, a directory or a reachable hub repository"
        remedy = "Check the name; offline machines need a local directory."
        raise BackboneError(rule, name, remedy) from error
    return f"{name}@{Path(snapshot).name}"  # the folder of a snapshot is named by its commit


def _identity(sums: Mapping[str, str]) -> str:
    """Return the SHA-256 over those of configuration and weights, out of a directory's files."""
    lines = [
        f"{name} {digest}"
        for name, digest in sorted(sums.items())
        if name == "config.json" or name.endswith(".safetensors")
    ]
    return sha256_bytes("\n".join(lines).encode())


def _nowhere(what: str, value: str, remedy: str) -> BackboneError:
    rule = (
        f"a {what} must be a known name ({', '.join(backbone_names())}), a .gguf file, a directory "
        "with safetensors weights, or a reachable hub repository without code of its own"
    )
    return BackboneError(rule, value, remedy)
