"""Addresses such as ``s3://bucket/key?region=x``: which may be shown, and what of them may not.

This is the one place that takes credentials out of what is printed, logged or stored. It says, too,
which names can only be paths.
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import quote, unquote

from umim_core.errors import UmimError, require

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_IN_TEXT: Final = re.compile(r"://\S+")
# A colon that no port follows starts a password, which may hold slashes: up to the last "@" then.
_USER: Final = re.compile(r"(?<=://)(?:[^/?]*@|[^/?:]*:(?!\d+(?:/|$))[^?]*@)")
# Bounded: a long text without "=" would be read again from each "?" and each such word.
_SECRET_OPTION: Final = re.compile(
    r"(?<=[?&#;])"
    r"([^=&?#;]*(?:key|secret|token|passw|pwd|signature|credential|auth)[^=&]{0,99}=|sig=)"
    r"([^&\s]+)",
    re.I,
)
# A container of Azure stands before its account: abfs://container@account.dfs.core.windows.net/p
_CONTAINER: Final = re.compile(r"(?:abfss?|az|adl|wasbs?)://[^/:@]+@[^/:@]+(?:/[^@]*)?")
_SHORTEST_USER: Final = 4  # a shorter name may be a part of any word


def is_address(name: str) -> bool:
    """Return whether a name is an address (``s3://...``) and no local path."""
    return _ADDRESS.match(name) is not None


def is_path(name: str) -> bool:
    """Return whether a name is taken as one of a file or folder, and never asked of the hub."""
    begins, ends = name.startswith((".", "/", "~", "\\")), name.endswith(("/", ".gguf"))
    return begins or ends or name.count("/") > 1


def check_path(what: str, name: str, error: type[UmimError]) -> None:
    """Refuse a name that is taken as a path and leads nowhere."""
    rule = f"a {what} that is named by its path must exist"
    value, remedy = f"{name!r}, a path that does not exist", "Check the path."
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+\.gguf", name):
        remedy = "Check the path; download a hub repository of such a name, and name its folder."
    require(os.path.exists(name) or not is_path(name), error, rule, value, remedy)


def beside(name: str) -> str:
    """Return a remedy for a name that leads nowhere while its folder exists; "" for another one."""
    folder, last = os.path.split(name)
    is_lost = os.path.isdir(folder) and not os.path.lexists(name)
    return f"Check the path: {folder} holds no {last}." if is_lost else ""


def without_options(name: str) -> str:
    """Return an address up to its ``?``; a local path as it is."""
    return name.partition("?")[0] if is_address(name) else name


def has_credentials(address: str) -> bool:
    """Return whether an address names a user, or has options, which may hold anything."""
    plain = unquote(address)
    return "?" in plain or "#" in plain or (_user(plain) != "" and not _CONTAINER.fullmatch(plain))


def redacted(name: str) -> str:
    """Return a name that may be shown: an address without its credentials."""
    if "://" not in name:
        return name
    parts = [_USER.sub("***@", named) + rest for named, rest in _parts(name)]
    return _SECRET_OPTION.sub(r"\1***", "?".join(parts))


def scrubbed(text: str, *addresses: str) -> str:
    """Take credentials out of a text, such as another library's error.

    Those of ``addresses`` go wherever they stand, those of every address in the text, too:
    ``scrubbed("no bucket K:S in http://me:pw@host/x", "s3://K:S@b")`` is
    ``"no bucket *** in http://***@host/x"``.
    """
    for address in addresses:
        text = text.replace(address, redacted(address)) if address else text
        for secret in _secrets(address):
            for form in (secret, unquote(secret), quote(unquote(secret), safe="")):
                text = text.replace(form, "***")
    return _IN_TEXT.sub(lambda found: redacted(found[0]), text)


def _secrets(address: str) -> list[str]:
    """Return the credentials of an address, the longest first: one may be a part of another."""
    found = {value for _, value in _SECRET_OPTION.findall(address)}
    if user := _user(address):
        both = user.removesuffix("@")
        name, _, password = both.partition(":")
        found |= {user, both, password, *([name] if len(name) >= _SHORTEST_USER else [])}
    return sorted(filter(None, found), key=len, reverse=True)


def _user(address: str) -> str:
    """Return the first user that an address names, with the password and the ``@``; "" of none."""
    users = (_USER.search(named) for named, _ in _parts(address))
    return next((user[0] for user in users if user), "")


def _parts(address: str) -> list[tuple[str, str]]:
    """Cut an address at each ``?``, and each part behind its last ``@``.

    Users stand before those; else a search would read on from each ``://`` to the end.
    """
    ends = ((part, part.rfind("@") + 1) for part in address.split("?"))
    return [(part[:end], part[end:]) for part, end in ends]
