"""Every change of what a stage is given, one at a time, and the key that each of them leads to.

Configuration is walked field by field through its pydantic models, artifacts part by part; a field
that is added tomorrow is varied tomorrow, without a line here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage

Special = Mapping[str, object]


@dataclass(frozen=True)
class Edit:
    """A change of a file that a stage reads where it lies: as its content, or what it replaces."""

    path: Path
    old: bytes
    new: bytes


@dataclass
class StageCall:
    """A stage with what it is given, and what of that must not be in its key.

    Attributes:
        function: The stage function.
        given: Its arguments by name, without the root.
        free: Beginnings of the names of variations that must keep the key, each with the reason.
        edits: Changes of files on disk, by name.
    """

    function: Callable[..., Artifact]
    given: dict[str, Any]
    free: dict[str, str]
    edits: dict[str, Edit] = field(default_factory=dict)


class Artifacts:
    """Makes artifacts of a few files, and others that differ in one part."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents = dict[Path, tuple[dict[str, str], dict[str, str]]]()

    def make(self, stage: str, *files: str, changed: str = "", **config: str) -> Artifact:
        """Return an artifact of these files, or folders with one file, made by a configuration."""
        return self._build(stage, dict.fromkeys(files, "as it was"), config, changed)

    def variations(self, artifact: Artifact) -> Iterator[tuple[str, Artifact]]:
        """Yield the artifact with another content in one file or folder, or made otherwise."""
        files, config = self._contents[artifact.path]
        for name in files:
            other = files | {name: "changed"}
            yield f"/{name}", self._build(artifact.stage, other, config, artifact.key)
        for name in config:
            made = config | {name: "changed"}
            yield f".{name}", self._build(artifact.stage, files, made, artifact.key)

    def _build(
        self, stage: str, files: dict[str, str], config: dict[str, str], of: str
    ) -> Artifact:
        def build(out: Path) -> Metrics:
            for name, text in files.items():
                path = out / name if "." in name else out / name / "data.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return {}

        spec = StageSpec(stage, 1, {"files": files, "of": of, **config}, {})
        made = run_stage(self._root, spec, build)
        self._contents[made.path] = files, config
        return made


def variations(
    value: object, name: str, hint: object, special: Special, artifacts: Artifacts
) -> Iterator[tuple[str, Any]]:
    """Yield (where, changed copy) for every leaf below a value.

    Args:
        value: What a stage is given.
        name: The name of the argument or field.
        hint: Its annotation.
        special: Other values by name of a field, where not any will do.
        artifacts: Made the artifacts within.
    """

    def below(part: object, part_name: str, part_hint: object) -> Iterator[tuple[str, Any]]:
        return variations(part, part_name, part_hint, special, artifacts)

    if name in special and (value is None or type(value) is type(special[name])):
        yield "", special[name]
    elif isinstance(value, Artifact):
        yield from artifacts.variations(value)
    elif isinstance(value, ClusterLease):
        for where, config in below(value.config, name, None):
            yield where, ClusterLease(config)
    elif isinstance(value, BaseModel):
        for part_name, info in type(value).model_fields.items():
            for where, changed in below(getattr(value, part_name), part_name, info.annotation):
                yield f".{part_name}{where}", value.model_copy(update={part_name: changed})
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            for where, changed in below(getattr(value, part.name), part.name, part.type):
                yield f".{part.name}{where}", replace(value, **{part.name: changed})
    elif isinstance(value, dict):
        for key, part in value.items():
            for where, changed in below(part, key, None):
                yield f"[{key}]{where}", {**value, key: changed}
    elif isinstance(value, list | tuple) and value and not isinstance(value[0], str | int | float):
        for number, part in enumerate(value):
            for where, changed in below(part, name, None):
                copy = [*value[:number], changed, *value[number + 1 :]]
                yield f"[{number}]{where}", type(value)(copy)
    else:
        yield from (("", other) for other in _others(value, hint))


def _others(value: object, hint: object) -> Iterator[object]:
    """Yield another value of the same type; nothing where there is but one."""
    choices = [] if isinstance(value, tuple) else list(_choices(hint))
    if choices:
        yield from [choice for choice in choices if choice != value][:1]
    elif value is None and "Artifact" in str(hint):
        return  # of a run that has none
    elif value is None:
        yield from [7] if "int" in str(hint) else [0.5] if "float" in str(hint) else ["another"]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value / 2 if value else 0.25
    elif isinstance(value, str):
        yield f"{value}-another"
    elif isinstance(value, tuple):
        yield (*value, value[0])
    else:
        raise TypeError(f"no other value is known for {value!r}, annotated {hint}")


def _choices(hint: object) -> Iterator[object]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _choices(part)


def key_of(call: StageCall, given: Mapping[str, Any], root: Path) -> str:
    """Return the key that a stage would have; nothing is built."""
    module = sys.modules[call.function.__module__]

    def asked(root: Path, spec: StageSpec, _: object) -> Artifact:
        return Artifact(spec.name, spec.key, root, "", executed=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_stage", asked)
        return call.function(root, **given).key


def keys_of_variations(
    call: StageCall, special: Special, artifacts: Artifacts, root: Path
) -> Iterator[tuple[str, str]]:
    """Yield each variation's name and the key that it leads to."""
    hints = get_type_hints(call.function)
    assert set(call.given) == set(inspect.signature(call.function).parameters) - {"root"}
    for name, value in call.given.items():
        for where, changed in variations(value, name, hints[name], special, artifacts):
            yield name + where, key_of(call, call.given | {name: changed}, root)
    for name, edit in call.edits.items():
        before = edit.path.read_bytes()
        assert edit.old in before, f"{name}: {edit.path.name} does not hold {edit.old!r}"
        edit.path.write_bytes(before.replace(edit.old, edit.new))
        try:
            yield name, key_of(call, call.given, root)
        finally:
            edit.path.write_bytes(before)
