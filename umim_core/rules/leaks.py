"""Private text that rules may give away: addresses, keys and numbers that their spans spell out.

A rule of four tokens is too short for most secrets, but rules overlap: what is frequent can be put
together again from them. So the scan reads a rule of four or more with what others of its length
add to it without a choice, and takes a tell-tale beginning for the whole::

    (jane . do e) (. do e @) (do e @ ac) (e @ ac me) (@ ac me .org)     jane.doe@acme.org

What documentation is full of (``user@example.com``, ``sk-xxx``, powers of two, dates) is no leak.
The scan knows forms, not meanings: names pass it; ``min_documents`` is the guard against those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.errors import LeakError
from umim_core.rules.grams import pack_spans
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import Ints

Kind = Literal["e-mail address", "API key", "private key", "URL with password", "long number"]
LeakPolicy = Literal["refuse", "allow"]

_CHUNK: Final = 1 << 16  # spans decoded at once
_CHAINED: Final = 4  # tokens of rules that others go on from; fewer tell nothing
_STEPS: Final = 8  # rules that may be added to one
_SHOWN: Final = 5  # leaks named in an error
_VISIBLE: Final = 4  # characters of a leak shown in an error

# The account of code hosts that nobody owns is none, nor are domains for documentation (RFC 2606).
_EMAIL: Final = re.compile(r"\w(?<!\bgit)@(?P<domain>\w[\w-]*(?:\.\w[\w-]*)*\.[A-Za-z]{2,})")
_NO_MAILBOX: Final = re.compile(
    r"(?:^|\.)(?:example|foo|bar|baz)\.(?:com|org|net|edu)$|\.(?:test|invalid|example|local)$"
)
_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA|xox[abprs]-)(?P<plain>[A-Z0-9]{4,})"
    r"|(?:gh[pousr]_|github_pat_|glpat-|sk-(?:proj-|ant-|live-)?|[sr]k_live_|AIza|hf_|npm_|pypi-)"
    r"(?P<tail>[A-Za-z0-9]{4,})|eyJ(?P<jwt>[A-Za-z0-9_-]{4,}))"  # {"..., in base64
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
    span: tuple[int, ...]
    text: str
    kind: Kind
    count: int


def leak_kind(text: str) -> Kind | None:
    """Return what private text a span's text gives away, or None."""
    for kind, (pattern, is_private) in _CHECKS.items():
        searched = _DATE.sub(" ", text) if kind == "long number" else text
        if any(map(is_private, pattern.finditer(searched))):
            return kind
    return None


def _looks_random(match: re.Match[str]) -> bool:
    """Return whether the kind of character changes as often as in random text, unlike in names."""
    if match["plain"]:
        return any(c.isdigit() for c in match["plain"])
    tail = match["jwt"] or match["tail"]
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in tail]
    changes = sum(a != b for a, b in pairwise(kinds))
    return changes >= 2 and 2.5 * changes >= len(tail) - 1


def _is_someones_number(match: re.Match[str]) -> bool:
    digits = "".join(c for c in match["digits"] if c.isdigit())
    marks = set(match[0]) - set(digits)
    if len(set(digits)) < 4 or digits in _COUNTING or digits in _COUNTING[::-1]:
        return False
    if not marks:  # no limit of an integer type, no seconds or milliseconds since 1970
        limit = any(n & (n - 1) == 0 for n in (int(digits) - 1, int(digits), int(digits) + 1))
        time = digits.startswith("1") and len(digits) in (10, 13)
        return len(digits) >= 9 and not limit and not time
    if marks == {" "}:  # rows of figures have blanks too: only cards count (ISO/IEC 7812-1)
        doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
        return len(digits) >= 13 and (sum(doubled) + sum(map(int, digits[::-2]))) % 10 == 0
    return not digits.startswith(("978", "979"))  # ISBN


_CHECKS: Final[dict[Kind, tuple[re.Pattern[str], Callable[[re.Match[str]], bool]]]] = {
    "URL with password": (
        _URL,
        lambda match: not any(map(_PLACEHOLDER.search, match.group("user", "password"))),
    ),
    "e-mail address": (_EMAIL, lambda match: not _NO_MAILBOX.search(match["domain"])),
    "API key": (_KEY, _looks_random),
    "private key": (_PRIVATE_KEY, bool),
    "long number": (_NUMBER, _is_someones_number),
}


def scan_rules(rules: RuleSet, tokenizer: PreTrainedTokenizerBase) -> list[Leak]:
    """Return the rules whose decoded text looks like an address, a key or a private number.

    The longest rules come first, those of a length by their ids.
    """
    leaks = []
    for n in reversed(rules.orders):
        ids, support = rules.ids_by_order[n], rules.support_by_order[n]
        following = _following(ids) if n >= _CHAINED else None
        for low in range(0, len(ids), _CHUNK):
            rows = np.arange(low, min(low + _CHUNK, len(ids)))
            spans = ids[rows].tolist() if following is None else _extended(ids, rows, following)
            texts = tokenizer.batch_decode(spans, clean_up_tokenization_spaces=False)
            for row, text in zip(rows.tolist(), texts, strict=True):
                if kind := leak_kind(text):
                    leaks.append(Leak(tuple(ids[row].tolist()), text, kind, int(support[row])))
    return leaks


def _following(ids: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Return for each rule [R, n] the only one that can follow it, or -1, and what that adds.

    The follower begins with the last n - 1 tokens of the rule, or, where none does, with its last
    n - 2, as the greedy filter leaves them; it adds one token, or two.
    """
    follower = np.full(len(ids), -1, dtype=np.int64)
    adds = np.zeros(len(ids), dtype=np.int64)
    open_end = np.ones(len(ids), dtype=np.bool_)
    size = ids.shape[1]
    for shared in (size - 1, size - 2):
        begin, end = pack_spans(ids[:, :shared]), pack_spans(ids[:, size - shared :])
        low, high = np.searchsorted(begin, end, "left"), np.searchsorted(begin, end, "right")
        only = open_end & (high - low == 1)
        follower[only], adds[only] = low[only], size - shared
        open_end &= high == low
    return follower, adds


def _extended(ids: NDArray[np.int32], rows: Ints, following: tuple[Ints, Ints]) -> list[list[int]]:
    """Return the tokens of some rules of a length, each with those of ``_STEPS`` followers."""
    columns, at = [ids[rows]], rows
    for _ in range(_STEPS):
        after = np.where(at >= 0, following[0][at], -1)
        adds = np.where(after >= 0, following[1][at], 0)[:, None]
        columns.append(np.where(adds >= [[2, 1]], ids[after, -2:], -1))
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
        rule = "published rules must spell out no address, key or private number"
        remedy = "Mine with a larger min_documents, protect such tokens, or allow leaks explicitly."
        raise LeakError(rule, f"{len(leaks)} of {len(rules)}: {shown}", remedy)
    return leaks
