"""Generated sentences that fill prompts, and texts inserted between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final


def words(text: str, border: str | None = None) -> tuple[str, ...]:
    """Cut a list of words at spaces, or at another border."""
    return tuple(text.split(border))


ADJECTIVES: Final = words(  # behind "a", too
    "bitter bright broad calm careful cheerful clever cold crimson curious distant faint famous "
    "gentle golden grey heavy hollow humble large lively lonely modest narrow noisy pale patient "
    "plain quiet rapid rough silver slow small solid steady strange sudden tall tidy warm wide "
    "young"
)
NOUNS: Final = words(
    "anchor apple baker barrel basket beacon bridge builder candle captain carpenter castle "
    "clock cottage engine farmer feather ferry field fisher forest fountain garden gate harbor "
    "hill island kettle ladder lantern letter market meadow mill miller mountain orchard "
    "painter piano pillar pond river road sailor shepherd station teacher tower valley village "
    "wagon window"
)
_VERBS: Final = words(
    "admired approached avoided carried crossed described followed forgot found guarded ignored "
    "kept left measured missed noticed opened passed remembered repaired reached sold visited "
    "watched welcomed"
)
_PLACES: Final = words(
    "after the rain;before the harvest;behind the old wall;by the shore;"
    "during the long winter;in the early morning;in the middle of the town;"
    "near the southern border;on a quiet evening;on the way home;under the open sky;"
    "without a word",
    ";",
)
_PATTERNS: Final = (
    "The {a} {n} {v} the {b} {m} {p}.",
    "Most people {v} the {n}, although the {m} was {a}.",
    "It was {p} that the {n} {v} a {a} {m}.",
    "Nobody knew why the {a} {n} {v} the {m}.",
    "Every {n} was {a}, and so was the {m}.",
    "There was a {a} {n} next to the {b} {m} {p}.",
)


def sentences(rng: Random) -> Iterator[str]:
    """Yield drawn sentences without end."""
    while True:
        drawn = {
            "a": rng.choice(ADJECTIVES),
            "b": rng.choice(ADJECTIVES),
            "n": rng.choice(NOUNS),
            "m": rng.choice(NOUNS),
            "v": rng.choice(_VERBS),
            "p": rng.choice(_PLACES),
        }
        yield rng.choice(_PATTERNS).format(**drawn)


def inserted(units: Sequence[str], others: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Insert other texts between units, at depths 0 (before all) .. 1 (behind); ties in order."""
    texts = list(units)
    places = [(round(depth * len(units)), text) for depth, text in zip(depths, others, strict=True)]
    for place, text in sorted(reversed(places), key=lambda pair: -pair[0]):
        texts.insert(place, text)
    return texts
