"""Roles whose contents of a chat may merge: users, system prompts, tools' schemas and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, cast, get_args

from umim_core.errors import ConfigError, require

Role = Literal["user", "system", "tools", "tool"]
USER: Final[tuple[Role, ...]] = ("user",)
# Names of messages' roles in interfaces and templates, the assistant's among them.
MESSAGE_ROLES: Final[dict[str, Role | Literal["assistant"]]] = {
    **{"system": "system", "developer": "system", "user": "user", "assistant": "assistant"},
    **{"tool": "tool", "function": "tool", "ipython": "tool", "tool_response": "tool"},
}


def check_roles(roles: Sequence[str]) -> tuple[Role, ...]:
    """Return some roles; what is no collection of them is refused."""
    known = get_args(Role)
    listed: object = roles
    fits = isinstance(listed, Sequence) and not isinstance(listed, str)
    rule = f"roles must be some of {', '.join(known)}, each once"
    remedy = 'Give ["user"], or ["user", "tools"].'
    fits = fits and all(role in known for role in roles) and len(set(roles)) == len(roles)
    require(fits, ConfigError, rule, roles, remedy)
    return cast("tuple[Role, ...]", tuple(roles))
