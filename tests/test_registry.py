"""Registries: files add themselves, a name is taken once, an unknown one lists all."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import ConfigError
from umim_core.registry import Registry


@pytest.fixture
def registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Registry[str]:
    """A registry of a package of its own, with the files ``apple`` and ``pear``."""
    package = f"orchard_{request.node.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(
        f"from umim_core.registry import Registry\nFRUIT = Registry({package!r}, 'fruit')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pear", "apple"):
        source = f"from {package} import FRUIT\nFRUIT.add({name!r}, 'a {name}')\n"
        (tmp_path / package / f"{name}.py").write_text(source)
    found: Registry[str] = __import__(package).FRUIT
    return found


def test_files_of_the_package_are_found_by_their_names(registry: Registry[str]) -> None:
    assert registry.names() == ("apple", "pear")
    assert registry.find("pear") == "a pear"


def test_an_unknown_name_lists_all_and_suggests_the_closest(registry: Registry[str]) -> None:
    with pytest.raises(ConfigError, match=r"one of apple, pear; got peer.*mean 'pear'"):
        registry.find("peer")


def test_a_name_is_taken_once(registry: Registry[str]) -> None:
    registry.add("plum", "first")
    with pytest.raises(ConfigError, match="plum"):
        registry.add("plum", "second")
    assert registry.find("plum") == "first"
