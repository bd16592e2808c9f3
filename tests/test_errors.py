"""Messages of errors: one bounded line, printable, whatever the value is."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

import pytest

from umim_core.errors import ConfigError, did_you_mean, require

SHARED: list[object] = ["x"]
for _ in range(40):
    SHARED = [SHARED, SHARED]
DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]
CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
HUGE = 10**6_000  # its repr is a ValueError


@pytest.mark.parametrize(
    "value",
    [
        SHARED, DEEP, CIRCLE, HUGE, -HUGE, [HUGE], {HUGE: SHARED}, (HUGE,), {HUGE},
        frozenset({HUGE}), OrderedDict(a=DEEP), "x" * 10**8, b"x" * 10**8, "\ud800", ["\ud800"],
        {"\ud800": 1}, "a\nb\r\u2028", "\x1b[2J\x07", Path("a\x1b"), "\udc80", range(10**9),
        [float("nan")] * 10**6,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_is_one_short_printable_line(value: object) -> None:
    began = time.process_time()
    text = str(ConfigError("a rule", value, "A remedy."))
    assert time.process_time() - began < 1
    assert len(text) < 1_500 and text.startswith("a rule; got ")
    assert text.endswith(". A remedy.")
    text.encode()
    assert text.isprintable()


@pytest.mark.parametrize(
    "value",
    [None, 1, 1.5, True, [1, "a"], ("a", None), (1,), (), set(), {"a": [1]}, {1}, b"a"],
)
def test_small_values_are_shown_as_they_are(value: object) -> None:
    assert str(ConfigError("a rule", value)) == f"a rule; got {value!r}"


def test_texts_are_cut_and_others_kept() -> None:
    assert str(ConfigError("a rule", "é" * 201)) == f"a rule; got {'é' * 200}..."
    assert str(ConfigError("\ud800 must be\x1b")) == r"\ud800 must be\x1b"
    assert str(ConfigError("a rule", "", "Name one.")) == "a rule; got ''. Name one."
    assert str(ConfigError("a rule", Path("a b/x"))) == "a rule; got a b/x"
    assert ConfigError("a rule", DEEP).value is DEEP
    assert str(ConfigError("a rule", "It broke.", "Mend it.")) == "a rule; got It broke. Mend it."


def test_require_raises_what_it_is_told() -> None:
    require(True, ConfigError, "a rule", 1, "b")
    with pytest.raises(ConfigError, match=r"^a rule; got 1\. b$"):
        require(False, ConfigError, "a rule", 1, "b")
    assert did_you_mean("x" * 10**7, ["xx"]) == ""
