"""Rule sets of some lengths and texts that are made of their spans, whole and in part."""

from __future__ import annotations

from hypothesis import strategies as st

from umim_core.text.token_ids import MAX_TOKEN_ID

Spans = set[tuple[int, ...]]
LENGTHS = [(2, 3, 4), (2, 3, 5, 9), (2, 4, 8, 15, 16)]


@st.composite
def spans_and_texts(
    draw: st.DrawFn, texts: int = 1, most_tokens: int = 60
) -> tuple[Spans, list[list[int]]]:
    """Draw spans over a few tokens, and one or more texts."""
    size = draw(st.integers(2, 5))
    low = draw(st.sampled_from([0, 1000, MAX_TOKEN_ID - size + 1]))
    token = st.integers(low, low + size - 1)
    span = st.one_of(*(st.tuples(*[token] * n) for n in draw(st.sampled_from(LENGTHS))))
    spans = draw(st.sets(span, max_size=40))
    pieces = st.tuples(token)
    if spans:
        pieces |= st.builds(
            lambda span, first, end: span[first:end],
            st.sampled_from(sorted(spans)),
            st.integers(0, 3),
            st.integers(1, 16),
        )
    text = st.lists(pieces, max_size=most_tokens).map(
        lambda parts: [token for part in parts for token in part][:most_tokens]
    )
    return spans, draw(st.lists(text, min_size=1, max_size=texts))
