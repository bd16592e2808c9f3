"""Errors raised on purpose. Each message states the rule, the value found and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import PurePath
from reprlib import Repr
from types import TracebackType
from typing import Any, Final, TypeVar

T = TypeVar("T")
_UNSET: Final = object()  # no value given: ``None`` can be reported as a value
_MAX_VALUE_CHARS: Final = 200
_MAX_INT_BITS: Final = 1024
_LINE_ENDS: Final = re.compile(r"[\n\r\v\f\x85\u2028\u2029]")
# What a terminal obeys or no encoding has: control characters but line ends, lone surrogates.
_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# What a field must do, by pydantic's type of error or its first word.
_FIELD_RULES: Final = {
    "missing": "be given",
    "extra_forbidden": "be a known field",
    "literal_error": "be {expected}",
    "union_tag_invalid": "have a {discriminator} that is one of {expected_tags}",
    "union_tag_not_found": "have a {discriminator}",
    "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "finite_number": "be a finite number",
    "too_short": "have {min_length} or more entries",
    "too_long": "have at most {max_length} entries",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have at most {max_length} characters",
    "string_unicode": "be text without lone surrogates",
    "string_pattern_mismatch": "match {pattern}",
    "callable": "be callable",
    "is_instance_of": "be a {class}",
    "int": "be an integer",
    "float": "be a number",
    "bool": "be true or false",
    "string": "be text",
    "tuple": "be a list",
    "list": "be a list",
    "dict": "be a mapping",
    "model": "be a mapping",
}


class UmimError(Exception):
    """Report a broken rule, the value that broke it and what to do about it.

    Args:
        rule: What must hold, as a full clause ("max order must be 2, 3 or 4").
        value: The offending value; its ``repr`` is shown, cut after 200 characters, and no more of
            it is made than that.
        remedy: One sentence that says what to change.
    """

    def __init__(self, rule: str, value: object = _UNSET, remedy: str = "") -> None:
        self.value = None if value is _UNSET else value
        self._found = "" if value is _UNSET else f"; got {_shown(value)}"
        self.reword(rule, remedy)

    def reword(self, rule: str, remedy: str) -> None:
        """Say the same of the same value in other words."""
        self.rule, self.remedy = rule, remedy
        message = f"{rule}{self._found}"
        if remedy:  # what others say may end a sentence already
            message += f" {remedy}" if message.endswith((".", "!", "?")) else f". {remedy}"
        self.args = (_UNPRINTABLE.sub(_escaped, message),)


class _Short(Repr):
    """A bounded ``repr``: a nested or a shared value may have billions of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 40
        self.maxstring = self.maxother = 2 * _MAX_VALUE_CHARS

    def repr_int(self, x: int, level: int) -> str:
        huge = x.bit_length() > _MAX_INT_BITS  # Python refuses to write it
        return f"an integer of {x.bit_length():,} bits" if huge else repr(x)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxother])


_SHORT: Final = _Short()


def _shown(value: object) -> str:
    """Return a value in one short line; a path as people write it."""
    value = str(value) if isinstance(value, PurePath) else value
    text = str(value[: _MAX_VALUE_CHARS + 1]) if isinstance(value, str) else _SHORT.repr(value)
    cut = text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
    return _LINE_ENDS.sub(_escaped, cut) or "''"  # a text of nothing would look like a fault


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class ConfigError(UmimError):
    """A recipe, option or argument is outside its bounds."""


class CorpusError(UmimError):
    """Input text or token ids cannot be used."""


class RuleSetError(UmimError):
    """A rule set is malformed."""


class ResourceLimitError(UmimError):
    """A bound on memory is beyond the limit that was given."""


class LeakError(RuleSetError):
    """Rules to be published spell out private text of their corpus."""


class TokenizerMismatchError(UmimError):
    """Rules or a checkpoint belong to another tokenizer."""


class BackboneError(UmimError):
    """A backbone cannot be loaded or lacks what the method needs."""


class FetchError(BackboneError):
    """A packaged model cannot be fetched, or is not the one that was specified."""


class FetchHashError(FetchError):
    """A fetched file has another hash than the specified one."""


class BackboneMismatchError(UmimError):
    """A checkpoint belongs to another backbone."""


class CheckpointError(UmimError):
    """A merge checkpoint is missing, torn or of an unknown schema."""


class ArtifactError(UmimError):
    """An artifact directory is missing, torn, altered or outside its root."""


class LockError(UmimError):
    """Another live process holds the lock of an artifact."""


class GenerationError(UmimError):
    """Generation was asked for something that the engine or the backbone cannot do."""


class ContextLengthError(GenerationError):
    """A prompt, with its new tokens, does not fit the positions of the backbone."""


class NumericalError(UmimError):
    """A loss or a surrogate is NaN or infinite too often."""


class MissingExtraError(UmimError):
    """An optional dependency is not installed."""


class ClusterError(UmimError):
    """The Ray cluster cannot be started or has lost work."""


class TrackingError(UmimError):
    """The tracking server cannot be used."""


class EvaluationError(UmimError):
    """An evaluation cannot be run as configured."""


def require(
    ok: bool, error: type[UmimError], rule: str, value: object = _UNSET, remedy: str = ""
) -> None:
    """Raise ``error(rule, value, remedy)`` unless ``ok``."""
    if not ok:
        raise error(rule, value, remedy)


class translated(AbstractContextManager[None]):
    """Raise what ``typed`` makes of an error within, from it; None lets the error go on.

    For errors that no ``except`` can name: a panic of a Rust library has no class to import, and is
    no ``Exception``.
    """

    def __init__(self, typed: Callable[[BaseException], UmimError | None]) -> None:
        self._typed = typed

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and (typed := self._typed(error)) is not None:
            raise typed from error


def field_rule(field: str, error: Mapping[str, Any]) -> str:
    """Return the rule that a field breaks, of an error that pydantic found."""
    kind, context = error["type"], error.get("ctx", {})
    if kind.startswith(("greater", "less")) and str(error.get("input")).lower() == "nan":
        kind = "float"  # NaN lies within no bounds: they are not what is wrong
    words = _FIELD_RULES.get(kind) or _FIELD_RULES.get(kind.partition("_")[0])
    said = error["msg"].removeprefix("Value error, ")
    said = said if words is None else f"must {words.format_map(context)}"
    if said.startswith("must "):
        return f"{field or 'it'} {said}"
    return f"{field}: {said}".removeprefix(": ")


def look_up(entries: Mapping[str, T], name: str, what: str, remedy: str = "") -> T:
    """Return the entry of a name; an unknown one lists all and suggests the closest."""
    require(
        name in entries,
        ConfigError,
        f"{what} must be one of {', '.join(entries)}",
        name,
        did_you_mean(name, entries) or remedy,
    )
    return entries[name]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``Did you mean 'x'?`` for the closest of the known names, "" if none is close."""
    close = get_close_matches(given[:_MAX_VALUE_CHARS], list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
