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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from transformers import PreTrainedTokenizerBase

from umim_core.errors import LeakError
from umim_core.rules.ruleset import RuleSet

Kind = Literal["e-mail address", "API key", "private key", "URL with password", "long number"]
LeakPolicy = Literal["refuse", "allow"]
Span = tuple[int, ...]

_CHAINED: Final = 4  # tokens of rules that others go on from; fewer tell nothing
_STEPS: Final = 8  # rules that may be added to one
_SHOWN: Final = 5  # leaks named in an error

# The account of code hosts that nobody owns is none, nor are domains for documentation (RFC 2606).
_EMAIL: Final = re.compile(
    r"\w(?<!\bgit)@(?!(?:[\w-]+\.)*(?:(?:example|foo|bar|baz)\.(?:com|org|net|edu)"
    r"|[\w-]+\.(?:test|invalid|example|local))(?![\w-]|\.\w))\w[\w-]*(?:\.\w[\w-]*)*\.[A-Za-z]{2,}"
)
_KEY: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA|xox[abprs]-)(?=[A-Z]*\d)[A-Z0-9]{4,}"
    r"|(?:gh[pousr]_|github_pat_|glpat-|sk-(?:proj-|ant-|live-)?|[sr]k_live_|AIza|hf_|npm_|pypi-)"
    r"(?P<tail>[A-Za-z0-9]{4,})|eyJ(?P<jwt>[A-Za-z0-9_-]{4,}))"  # {"..., in base64
)
_PRIVATE_KEY: Final = re.compile(r"BEGIN (?:[A-Z]+ )*PRIVATE|PRIVATE KEY(?: BLOCK)?-")
_URL: Final = re.compile(  # but for placeholders
    r"(?:^|[\s/\"'`(<])(?!x+:|[^\s@]*(?:[<>{}\[\]$%*]|\.{3}|pass|pwd|secret|token|tiger|example))"
    r"[\w.+-]+:(?!x+@)[^\s:@/\"'`]+@(?:\w|$)",
    re.IGNORECASE,
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
    span: Span
    text: str
    kind: Kind
    count: int


def leak_kind(text: str) -> Kind | None:
    for kind, (pattern, is_private) in _CHECKS.items():
        searched = _DATE.sub(" ", text) if kind == "long number" else text
        if any(map(is_private, pattern.finditer(searched))):
            return kind
    return None


def _looks_random(match: re.Match[str]) -> bool:
    """Return whether the kind of character changes as often as in random text, unlike in names."""
    tail = match["jwt"] or match["tail"]
    if tail is None:  # capitals and digits, with a digit by the pattern
        return True
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
    "URL with password": (_URL, bool),
    "e-mail address": (_EMAIL, bool),
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
        spans = list(map(tuple, rules.ids_by_order[n].tolist()))
        read = list(map(list, spans if n < _CHAINED else _extended(spans)))
        texts = tokenizer.batch_decode(read, clean_up_tokenization_spaces=False) if read else []
        counts = rules.support_by_order[n].tolist()
        for span, text, count in zip(spans, texts, counts, strict=True):
            if kind := leak_kind(text):
                leaks.append(Leak(span, text, kind, count))
    return leaks


def _extended(spans: Sequence[Span]) -> list[Span]:
    """Return spans of one length, each with the tokens of up to ``_STEPS`` that follow it.

    A follower begins with all tokens of a span but the first, or, as the greedy filter leaves them,
    but the first two; it is the only one that does.
    """
    following: dict[Span, Span | None] = {}
    for span in spans:
        for added in (1, 2):
            begin = span[:-added]
            following[begin] = None if begin in following else span[-added:]
    extended = []
    for span in spans:
        read, size = span, len(span)
        for _ in range(_STEPS):
            read += following.get(read[1 - size :], following.get(read[2 - size :])) or ()
        extended.append(read)
    return extended


def check_export(
    rules: RuleSet, tokenizer: PreTrainedTokenizerBase, policy: LeakPolicy = "refuse"
) -> list[Leak]:
    """Scan rules before they are published and return the leaks; none under ``refuse``."""
    leaks = scan_rules(rules, tokenizer)
    if leaks and policy == "refuse":
        shown = ", ".join(f"{leak.kind} {leak.span}" for leak in leaks[:_SHOWN])
        rule = "published rules must spell out no address, key or private number"
        remedy = "Mine with a larger min_documents, protect such tokens, or allow leaks explicitly."
        raise LeakError(rule, f"{len(leaks)} of {len(rules)}: {shown}", remedy)
    return leaks
