"""Errors of the HTTP interface, in OpenAI's form."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from umim_core.errors import NumericalError, UmimError

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    500: "server_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_SECONDS: Final = 1


class ApiError(UmimError):
    """A request cannot be answered.

    Args:
        status: HTTP status.
        code: Short name of the reason, for programs.
        rule: See ``UmimError``; so are value and remedy.
        value: What broke the rule.
        remedy: What to change.
        param: The field at fault, if it is one.
    """

    def __init__(
        self,
        status: int,
        code: str,
        rule: str,
        value: object = None,
        remedy: str = "",
        *,
        param: str | None = None,
    ) -> None:
        super().__init__(rule, value, remedy)
        self.status, self.code, self.param = status, code, param

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all parts where a replica sends it."""
        parts = (self.status, self.code, self.rule, self.value, self.remedy)
        return type(self), parts, {"param": self.param}

    def document(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.status == 503:
            return {"retry-after": str(RETRY_SECONDS)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def try_later(code: str, rule: str, value: object) -> ApiError:
    """Return a 503: what cannot be answered now may be later."""
    return ApiError(503, code, rule, value, "Try again later.")


def api_error(error: UmimError) -> ApiError:
    """Return an error of the library as one of the interface: 400, but for numbers gone wrong."""
    if isinstance(error, ApiError):
        return error
    own = isinstance(error, NumericalError)
    status, code = (500, "numerical_error") if own else (400, "invalid_request")
    return ApiError(status, code, error.rule, error.value, error.remedy)


def field_error(error: ValidationError) -> ApiError:
    """Return the first thing that a body's check found; values of prompts are not repeated."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        rule, remedy = "fields must be ones that this server knows", "Leave it out."
        return ApiError(400, "unknown_field", rule, param, remedy, param=param)
    value = first["input"] if isinstance(first["input"], int | float) else None
    rule, remedy = f"{param or 'the body'}: {first['msg']}", "Correct it, or leave it out."
    shown = type(first["input"]).__name__ if value is None else value
    return ApiError(400, "invalid_field", rule, shown, remedy, param=param or None)
