"""Registry of named entries that the files of a package add."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from umim_core.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Named entries that the files of a package add.

    The files are imported at the first look, so a new entry is one new file. Messages call an entry
    by the word ``entry``, "baseline" say.
    """

    def __init__(self, package: str, entry: str) -> None:
        self._package, self._entry = package, entry
        self._found: dict[str, T] = {}
        self._walked: tuple[str, ...] = ()

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates under a name."""

        def put(value: T) -> T:
            if name in self._found:
                raise ConfigError(
                    f"every {self._entry} must have a name of its own", name, "Choose another."
                )
            self._found[name] = value
            return value

        return put

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order."""
        path = tuple(import_module(self._package).__path__)
        if path != self._walked:
            self._walk(self._package)
            self._walked = path
        return tuple(sorted(self._found))

    def _walk(self, package: str) -> None:
        """Import the files of a package and of the packages in it."""
        for module in iter_modules(import_module(package).__path__):
            name = f"{package}.{module.name}"
            import_module(name)
            if module.ispkg:
                self._walk(name)

    def find(self, name: str) -> T:
        """Return the entry of a name."""
        known = self.names()
        if name not in self._found:
            raise ConfigError(
                f"a {self._entry} must be one of {', '.join(known)}",
                name,
                did_you_mean(name, known) or f"A new one is a file of {self._package}.",
            )
        return self._found[name]
