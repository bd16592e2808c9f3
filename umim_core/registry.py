"""Registry of named entries that the files of a package add."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from umim_core.errors import ConfigError, look_up, require

T = TypeVar("T")


class Registry(Generic[T]):
    """Named entries that the files of a package add.

    The files are imported at the first look, so a new entry is one new file. Messages call an entry
    by the word ``entry``, "task" say.
    """

    def __init__(self, package: str, entry: str) -> None:
        self._package, self._entry = package, entry
        self._found: dict[str, T] = {}
        self._walked: tuple[str, ...] = ()

    def add(self, name: str, value: T) -> None:
        rule = f"every {self._entry} must have a name of its own"
        require(name not in self._found, ConfigError, rule, name, "Choose another.")
        self._found[name] = value

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order."""
        path = tuple(import_module(self._package).__path__)
        if path != self._walked:
            for module in iter_modules(path, f"{self._package}."):
                import_module(module.name)
            self._walked = path
        return tuple(sorted(self._found))

    def find(self, name: str) -> T:
        entries = {name: self._found[name] for name in self.names()}
        remedy = f"A new one is a file of {self._package}."
        return look_up(entries, name, f"a {self._entry}", remedy)
