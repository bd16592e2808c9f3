"""Private text that rules may give away: addresses, keys and numbers that their spans spell out.

A rule has at most four tokens, too few for most secrets, but rules overlap: what is frequent can be
put together again from them. So the scan reads a 4-gram with what other 4-grams add to it without a
choice, and takes a tell-tale beginning for the whole::

    (jane . do e) (. do e @) (do e @ ac) (e @ ac me) (@ ac me .org)     jane.doe@acme.org

What documentation is full of (``user@example.com``, ``sk-xxx``, powers of two, dates) is no leak.
The scan knows forms, not meanings: names pass it; ``min_documents`` is the guard against those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.errors import LeakError
from umim_core.rules.filters import pack_spans
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]

Kind = Literal["e-mail address", "API key", "private key", "URL with password", "long number"]
LeakPolicy = Literal["refuse", "allow"]

_CHUNK: Final = 1 << 16  # spans decoded at once
_STEPS: Final = 8  # rules that may be added to one
_SHOWN: Final = 5  # leaks named in an error
_VISIBLE: Final = 4  # characters of a leak shown in an error

_EMAIL: Final = re.compile(r"\w@(?P<domain>\w[\w-]*(?:\.\w[\w-]*)*\.[A-Za-z]{2,})")
# Reserved for documentation (RFC 2606), and the account of code hosts that nobody owns.
_NO_MAILBOX: Final = re.compile(
    r"(?:^|\.)(?:example|foo|bar|baz)\.(?:com|org|net|edu)$|\.(?:test|invalid|example|local)$"
)
_CODE_HOST: Final = re.compile(r"(?<!\w)git@$")
_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:AKIA|ASIA|xox[abprs]-)(?P<plain>[A-Z0-9]+)"
    r"|(?:gh[pousr]_|github_pat_|glpat-|sk-(?:proj-|ant-|live-)?|[sr]k_live_|AIza|hf_"
    r"|npm_|pypi-)(?P<tail>[A-Za-z0-9]+)"
    r"|eyJ(?P<jwt>[A-Za-z0-9_-]+)"  # what a JSON object, {"..., is in base64
    r")"
)
_PRIVATE_KEY: Final = re.compile(r"BEGIN (?:[A-Z]+ )*PRIVATE|PRIVATE KEY(?: BLOCK)?-")
_URL: Final = re.compile(
    r"(?:^|[\s/\"'`(<])(?P<user>[\w.+-]+):(?P<password>[^\s:@/\"'`]+)@(?:\w|$)"
)
_PLACEHOLDER: Final = re.compile(
    r"[<>{}\[\]$%*]|\.\.\.|^x+$|pass|pwd|secret|token|tiger|example", re.IGNORECASE
)
# Digits as phone, card and account numbers are written; no part of a name, a path or a decimal. At
# the very start of a text they may be any of these, and the rule before them tells.
_NUMBER: Final = re.compile(
    r"(?:\+|(?<=[^\w.,+/-]))(?P<digits>\(?\d(?:[ ()-]{0,2}\d){7,18})(?![\w-]|[.,]\d)"
)
_DATE: Final = re.compile(
    r"(?<!\d)(?:(?:19|20)\d\d-?(?:0[1-9]|1[0-2])-?[0-3]\d|[0-3]\d-[0-3]\d-(?:19|20)\d\d)(?!\d)"
)
_COUNTING: Final = " ".join(2 * run for run in ("0123456789", "123456789", "12345678"))


@dataclass(frozen=True)
class Leak:
    """A rule that spells out private text."""

    span: tuple[int, ...]
    text: str
    kind: Kind
    count: int


def leak_kind(text: str) -> Kind | None:
    """Return what private text a span's text gives away, or None."""
    for kind, gives_away in _CHECKS.items():
        if gives_away(text):
            return kind
    return None


def _is_email(text: str) -> bool:
    for match in _EMAIL.finditer(text):
        account = text[: match.start("domain")]
        if not _NO_MAILBOX.search(match["domain"]) and not _CODE_HOST.search(account):
            return True
    return False


def _is_key(text: str) -> bool:
    for match in _KEY.finditer(text):
        if match["plain"] is not None:
            if len(match["plain"]) >= 4 and any(c.isdigit() for c in match["plain"]):
                return True
        elif _looks_random(match["jwt"] or match["tail"]):
            return True
    return False


def _looks_random(tail: str) -> bool:
    """Return whether the kind of character changes as often as in random text, unlike in names."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in tail]
    changes = sum(a != b for a, b in zip(kinds[1:], kinds[:-1], strict=True))
    return len(tail) >= 4 and changes >= 2 and 2.5 * changes >= len(tail) - 1


def _is_url_with_password(text: str) -> bool:
    return any(
        not _PLACEHOLDER.search(match["password"]) and not _PLACEHOLDER.search(match["user"])
        for match in _URL.finditer(text)
    )


def _is_long_number(text: str) -> bool:
    for match in _NUMBER.finditer(_DATE.sub(" ", text)):
        digits = "".join(c for c in match["digits"] if c.isdigit())
        marks = set(match[0]) - set(digits)
        if len(set(digits)) < 4 or digits in _COUNTING or digits in _COUNTING[::-1]:
            continue
        if not marks and len(digits) >= 9 and not _is_machine_number(digits):
            return True
        # Rows of figures have blanks too: without a mark of a phone number, only cards count.
        if marks == {" "} and 13 <= len(digits) <= 19 and _passes_luhn(digits):
            return True
        if marks - {" "} and not digits.startswith(("978", "979")):  # ISBN
            return True
    return False


def _passes_luhn(digits: str) -> bool:
    """Return whether the last digit checks the others, as on payment cards (ISO/IEC 7812-1)."""
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(int(digit) for digit in digits[::-2])) % 10 == 0


def _is_machine_number(digits: str) -> bool:
    """Return whether digits are the limit of an integer type, or seconds or ms since 1970."""
    value = int(digits)
    powers = (value - 1, value, value + 1)
    if any(power and power & (power - 1) == 0 for power in powers):
        return True
    return digits.startswith("1") and len(digits) in (10, 13)


_CHECKS: Final[dict[Kind, Callable[[str], bool]]] = {
    "URL with password": _is_url_with_password,
    "e-mail address": _is_email,
    "API key": _is_key,
    "private key": lambda text: _PRIVATE_KEY.search(text) is not None,
    "long number": _is_long_number,
}


def scan_rules(rules: RuleSet, tokenizer: PreTrainedTokenizerBase) -> list[Leak]:
    """Return the rules whose decoded text looks like an address, a key or a private number.

    The longest rules come first, those of a length by their ids.
    """
    leaks = []
    for n in reversed(ORDERS):
        ids, support = rules.ids_by_order[n], rules.support_by_order[n]
        following = _following(ids) if n == ORDERS[-1] else None
        for low in range(0, len(ids), _CHUNK):
            rows = np.arange(low, min(low + _CHUNK, len(ids)))
            spans = ids[rows].tolist() if following is None else _extended(ids, rows, following)
            texts = tokenizer.batch_decode(spans, clean_up_tokenization_spaces=False)
            for row, text in zip(rows.tolist(), texts, strict=True):
                if kind := leak_kind(text):
                    leaks.append(Leak(tuple(ids[row].tolist()), text, kind, int(support[row])))
    return leaks


def _following(ids: Ids) -> tuple[Ints, Ints]:
    """Return for each 4-gram [R, 4] the only one that can follow it, or -1, and what that adds.

    The follower begins with the last three tokens of the rule, or, where none does, with its last
    two, as the greedy filter leaves them; it adds one token, or two.
    """
    follower = np.full(len(ids), -1, dtype=np.int64)
    adds = np.zeros(len(ids), dtype=np.int64)
    open_end = np.ones(len(ids), dtype=np.bool_)
    for shared in (3, 2):
        begin, end = pack_spans(ids[:, :shared]), pack_spans(ids[:, 4 - shared :])
        low, high = np.searchsorted(begin, end, "left"), np.searchsorted(begin, end, "right")
        only = open_end & (high - low == 1)
        follower[only], adds[only] = low[only], 4 - shared
        open_end &= high == low
    return follower, adds


def _extended(ids: Ids, rows: Ints, following: tuple[Ints, Ints]) -> list[list[int]]:
    """Return the tokens of some 4-grams, each with those of up to ``_STEPS`` followers."""
    columns, at = [ids[rows]], rows
    for _ in range(_STEPS):
        after = np.where(at >= 0, following[0][at], -1)
        adds = np.where(after >= 0, following[1][at], 0)[:, None]
        columns.append(np.where(adds >= [[2, 1]], ids[after, 2:], -1))
        at = after
    table = np.concatenate(columns, axis=1)
    return [row[row >= 0].tolist() for row in table]


def check_export(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase, policy: LeakPolicy = "refuse"
) -> list[Leak]:
    """Scan rules before they are published and return the leaks; none under ``refuse``."""
    leaks = scan_rules(rules, tokenizer)
    if leaks and policy == "refuse":
        shown = ", ".join(
            f"{leak.kind} {leak.text.strip()[:_VISIBLE] + '...'!r} {leak.span}"
            for leak in leaks[:_SHOWN]
        )
        raise LeakError(
            "published rules must spell out no address, key or private number",
            f"{len(leaks)} of {len(rules)}: {shown}",
            "Mine with a larger min_documents, protect such tokens, or allow leaks explicitly.",
        )
    return leaks
