"""Names and options that a user gives, as the sources of corpora.

A folder stands for its files::

    ("books", "a.txt")  ->  TextFiles(paths=("books/1.txt", "books/2.txt", "a.txt"))
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from umim_core.addresses import is_address, redacted
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import described
from umim_core.text.files import SourceKind, expand, kind_of, unknown_kind
from umim_core.text.sources import MODELS, Source

_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Reading:
    """How the names of a corpus are read; what is None is not given.

    Attributes:
        default_split: Split of a data set where none is given.
    """

    kind: SourceKind | None = None
    field: str | None = None
    split: str | None = None
    config: str | None = None
    max_bad: int | None = None
    default_split: str = "train"

    @property
    def given(self) -> dict[str, object]:
        """The options of rows and data sets that are given, by name."""
        values = {name: getattr(self, name) for name in ("field", "split", "config", "max_bad")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def flags(self) -> dict[str, object]:
        """All that are given, as options of a command."""
        kind = {} if self.kind is None else {"--kind": self.kind}
        return kind | {f"--{name.replace('_', '-')}": value for name, value in self.given.items()}


_AS_THEY_ARE: Final = Reading()


def source_of(names: tuple[str, ...], reading: Reading = _AS_THEY_ARE) -> Source:
    """Return the source that names and options describe; see `sources_of`."""
    return sources_of([names], reading)[0]


def sources_of(corpora: Sequence[tuple[str, ...]], reading: Reading = _AS_THEY_ARE) -> list[Source]:
    """Return the source of each corpus, of the kind that is given or that its names end in.

    A folder stands for the files of one kind that lie in it and below, each text file a document. A
    name like ``owner/name`` that is no file is a Hugging Face data set. An option that says nothing
    about any of the corpora is refused.
    """
    require(
        bool(corpora) or not (reading.given or reading.kind),
        ConfigError,
        "options of a corpus need one",
        ", ".join(["kind"] * (reading.kind is not None) + list(reading.given)),
        "Name its files, or leave the options out.",
    )
    sources = [_source(names, reading) for names in corpora]
    for name, value in reading.given.items():
        users = [kind for kind, model in MODELS.items() if name in model.model_fields]
        require(
            any(source.kind in users for source in sources),
            ConfigError,
            f"--{name.replace('_', '-')} is of corpora of the kinds {', '.join(users)}",
            f"{value} for {', '.join(source.kind for source in sources)}",
            "Leave it out: it would have no effect.",
        )
    return sources


def _source(names: tuple[str, ...], reading: Reading) -> Source:
    kind, places = reading.kind, names
    if kind != "dataset":
        places = tuple(place for name in names for place in _places(name, kind))
    if kind is None:
        kinds = Counter(_kind(place) for place in places)
        require(
            len(kinds) == 1,
            CorpusError,
            "a corpus must be of one kind",
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no name",
            "Name files of one kind; of a folder, --kind text (or another) takes only those.",
        )
        (kind,) = kinds
    require(
        len(places) == 1 or kind not in ("ids", "dataset"),
        CorpusError,
        f"a corpus of kind {kind} must be one name",
        ", ".join(map(redacted, places)),
        "Check the paths: a name that is no file is taken for a data set.",
    )
    model = MODELS[kind]
    fields = {name: value for name, value in reading.given.items() if name in model.model_fields}
    if kind == "dataset":
        fields |= {"name": places[0], "split": fields.get("split", reading.default_split)}
    elif kind == "ids":
        fields["path"] = places[0]
    else:
        fields["paths"] = places
    with described("a corpus must be given as it can be read", "Correct it.", ConfigError):
        return model.model_validate(fields)


def _places(name: str, kind: SourceKind | None) -> list[str]:
    """Return the files of a folder or of a local pattern; any other name as it is."""
    local = not is_address(name) and not os.path.isfile(name)
    if local and (os.path.lexists(name) or glob.has_magic(name)):
        return [file.location for file in expand((name,), kind)]
    return [name]


def _kind(name: str) -> SourceKind:
    kind = kind_of(name)
    if kind is not None:
        return kind
    parent, _, last = name.rpartition("/")
    # A file that is missing is no data set: hub ids have an owner, and no folder here.
    like_hub = _HUB_ID.fullmatch(name) and (parent or "." not in last) and not os.path.isdir(parent)
    if like_hub and not os.path.lexists(name):
        return "dataset"
    require(
        is_address(name) or os.path.lexists(name),
        CorpusError,
        "a corpus file must exist",
        name,
        "Check the path.",
    )
    raise unknown_kind(name)
