"""Errors of Ray: the first cause, whole, and the remedy that fits it.

Ray wraps what a worker raised in errors of its own, one for each layer that it passes, and a
worker that was lost in others. Whoever runs the command needs what stands at the bottom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from umim_core import errors
from umim_core.errors import ClusterError, UmimError

_WRAPPED: Final = ("cause", "controller_failure", "health_check_failure", "__cause__")
_ENDS_OF_OTHERS: Final = ("gloo", "nccl", "closed by peer", "connection reset")
_KINDS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, UmimError)
}
_CORRECT: Final = "Correct what the error names, then run the same command again."


def first_cause(error: BaseException) -> BaseException:
    """Return what an error of Ray began with: an error of a worker's code, or the loss of it."""
    from ray.exceptions import RayTaskError

    seen = [error]
    while isinstance(error, RayTaskError) or not isinstance(error, UmimError):
        inner = next((candidate for candidate in _inside(error) if candidate not in seen), None)
        if inner is None:
            return error
        seen.append(inner)
        error = inner
    return error


def _inside(error: BaseException) -> Iterator[BaseException]:
    """Yield what an error wraps; of several workers first one that others did not fail for."""
    failures = getattr(error, "worker_failures", None) or {}
    workers = [failures[rank] for rank in sorted(failures)]
    yield from sorted(workers, key=_is_a_consequence)
    for name in _WRAPPED:
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            yield inner


def _is_a_consequence(error: BaseException) -> bool:
    """Tell whether a worker only lost its connection to another one."""
    text = str(first_cause(error)).lower()
    return any(sign in text for sign in _ENDS_OF_OTHERS)


def cluster_error(rule: str, error: BaseException, again: str) -> UmimError:
    """Return the typed error of a failed call of Ray.

    Returns:
        The cause itself if it is typed. A cause that the message cannot hold whole is its note.
    """
    from ray.exceptions import RayError, RayTaskError

    cause = first_cause(error)
    if isinstance(cause, UmimError):
        value = {} if cause.value is None else {"value": cause.value}
        return type(cause)(cause.rule, remedy=cause.remedy, **value)  # without Ray's own advice
    text = f"{type(cause).__name__}: {cause}".strip()
    lost = isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
    lost |= type(cause).__module__.startswith("ray.train")
    typed_error = ClusterError(rule, text.splitlines()[0], again if lost else _CORRECT)
    if text not in str(typed_error):
        typed_error.add_note(text)
    return typed_error


def as_data(error: UmimError) -> tuple[str, dict[str, str]]:
    """Return the name of its type, and its arguments."""
    value = {} if error.value is None else {"value": str(error.value)}
    return type(error).__name__, {"rule": error.rule, "remedy": error.remedy, **value}


def from_data(name: str, arguments: Mapping[str, str]) -> UmimError:
    return _KINDS[name](**arguments)
