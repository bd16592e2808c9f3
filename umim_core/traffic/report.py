"""Report on a log of requests: what is in it, and what merged spans would save of it.

No model is read. Spans are counted in four fifths of the conversations and matched in the rest::

    requests -> pieces -> token ids -> tokens by role and kind
                                    -> what a warm prefix cache serves
                                    -> spans of four fifths -> saved tokens of the last fifth
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from umim_core.backbone.shape import BackboneShape, local_shape
from umim_core.errors import ConfigError, CorpusError, did_you_mean, require
from umim_core.mining.mine import candidate_spans, excluded_ids
from umim_core.mining.span_choice import choose_spans
from umim_core.progress import counted
from umim_core.rules.matcher import Matcher
from umim_core.text.json_places import Place
from umim_core.text.token_ids import MAX_TOKEN_ID, Ids, flat
from umim_core.text.tokens import tokenize_parts
from umim_core.traffic.requests import Piece, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST: Final = (4, 8, 16)  # tokens of a span
ROWS: Final = (1024, 4096, 8192)  # spans
RAW: Final = "assistant"  # the role whose texts stay raw
NAMES: Final = {
    "tools": "tool schemas",
    "system": "system prompts",
    "user": "what users say",
    "tool": "tool results",
    "assistant": "replies and calls",
    "text": "texts without roles",
}
BLOCK: Final = 16  # tokens that a prefix cache shares at a time, as vLLM's does
HELD_OUT: Final = 5  # one conversation in so many
_LONG: Final = 4096  # tokens of a text that is cut: one file is many texts
_CHOICE_TOKENS: Final = 1 << 19  # tokens that spans are counted and chosen on at most
_PAYS: Final = 0.15  # of the prompt tokens that no prefix cache serves
_FREE: Final = 0.9  # of a GPU's memory, for weights and cache: vLLM's default
SHAPES: Final = {  # fields of a ``BackboneShape`` but the last: all have gates
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.3-70b": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-coder-1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
}


@dataclass(frozen=True)
class Saving:
    """Prompt tokens of held-out requests that spans save, as shares."""

    longest: int  # tokens of a span at most
    rows: int  # spans at most
    spans: int  # that were chosen
    all: float
    uncached: float  # of the tokens that a warm prefix cache does not serve
    roles: dict[str, float]  # of the tokens of each role


@dataclass(frozen=True)
class Memory:
    """A GPU with a model whose cache holds prompts: 16-bit weights, keys and values."""

    shape: str
    gpu_gib: float
    token_bytes: int  # of the keys and values of a token
    requests: int  # that fit, each of the mean length of prompt and reply
    merged: int  # likewise, with the spans of the best saving


@dataclass(frozen=True)
class TrafficReport:
    """What a log of requests holds, and what merging would save."""

    requests: int
    conversations: int
    held_out: int
    tokens: dict[str, dict[str, int]]  # of prompts, by role and kind of content
    reply_tokens: int  # where the log holds replies
    digits: float  # share of the prompt tokens with a digit; they stay raw
    cached: float  # share of the prompt tokens that begin like an earlier prompt
    savings: tuple[Saving, ...]  # by length and number; empty where there is too little text
    memory: Memory
    pays: bool
    verdict: str  # why

    @property
    def prompt_tokens(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.tokens.values())


@dataclass(frozen=True)
class _Text:
    """A piece of a prompt in ids, with the tokens that may merge; what calls must spell may not."""

    piece: Piece
    ids: Ids
    parts: Sequence[Place]

    def segments(self, start: int = 0) -> Iterable[Ids]:
        """Yield the ids that may merge, from a token on."""
        rest = (self.ids[max(first, start) : end] for first, end in self.parts)
        return (ids for ids in rest if self.piece.role != RAW and len(ids) > 1)


@dataclass(frozen=True)
class _Read:
    """A request in ids: its texts, and how many of its first tokens a prefix cache serves."""

    conversation: str
    prompt: tuple[_Text, ...]
    cached: int
    reply: int

    def segments(self, start: int = 0) -> Iterable[tuple[str, Ids]]:
        """Yield role and ids of all that may merge, from a token of the prompt on."""
        for text in self.prompt:
            yield from ((text.piece.role, ids) for ids in text.segments(start))
            start -= len(text.ids)


def traffic_report(
    requests: Sequence[Request],
    tokenizer: PreTrainedTokenizerBase,
    shape: str,
    gpu_gib: float,
) -> TrafficReport:
    """Measure some requests; ``shape`` names the model that serves them on such a GPU."""
    model = model_shape(shape)
    read = _read(requests, tokenizer)
    tokens: dict[str, dict[str, int]] = {}
    has_digit = np.zeros(MAX_TOKEN_ID + 1, dtype=np.bool_)
    has_digit[list(excluded_ids(tokenizer, ("digits",)))] = True
    total = numbers = 0
    for text in (text for request in read for text in request.prompt if len(text.ids)):
        kinds, content = tokens.setdefault(text.piece.role, {}), text.piece.content
        kinds[content] = kinds.get(content, 0) + len(text.ids)
        numbers += int(has_digit[text.ids].sum())
        total += len(text.ids)
    require(total > 0, CorpusError, "requests must hold tokens", "none", "Check the tokenizer.")
    order = list(dict.fromkeys(request.conversation for request in read))
    held = set(order[1::HELD_OUT])
    unseen = [request for request in read if request.conversation in held]
    savings = tuple(_savings(read, unseen, held, tokenizer)) if len(order) > 1 else ()
    cached = sum(request.cached for request in read) / total
    best = max(savings, key=lambda s: s.all, default=None)
    reply = sum(request.reply for request in read)
    lengths = total / len(read), reply / len(read)
    memory = _memory(shape, model, gpu_gib, *lengths, 0.0 if best is None else best.all)
    pays, verdict = _verdict(best, tokens, numbers / total, cached)
    return TrafficReport(
        requests=len(read),
        conversations=len(order),
        held_out=len(unseen),
        tokens=tokens,
        reply_tokens=reply,
        digits=numbers / total,
        cached=cached,
        savings=savings,
        memory=memory,
        pays=pays,
        verdict=verdict,
    )


def model_shape(name: str) -> BackboneShape:
    """Return the shape of a model by a name of ``SHAPES``, or of a model on this machine."""
    if name not in SHAPES:
        found = local_shape(name)
        if found is None:
            rule = f"a shape must be one of {', '.join(SHAPES)}, or a model on this machine"
            remedy = did_you_mean(name, SHAPES) or "Name one of them, or a model's directory."
            raise ConfigError(rule, name, remedy)
        return found
    sizes = zip(BackboneShape.model_fields, (*SHAPES[name], True), strict=True)
    return BackboneShape.model_validate(dict(sizes))


def _read(requests: Sequence[Request], tokenizer: PreTrainedTokenizerBase) -> list[_Read]:
    """Tokenize every text once, and follow a prefix cache that never forgets."""
    pieces = (piece for request in requests for piece in request.prompt)
    texts = dict.fromkeys(piece.text for piece in pieces if not piece.has_raw)
    texts |= dict.fromkeys(piece.text for request in requests for piece in request.reply)
    ids_of: dict[str, Ids] = {}
    waiting = iter(texts)
    parts: list[Ids] = []
    pieces_read = tokenize_parts(((text, True) for text in texts), tokenizer)
    for ids, last in counted(pieces_read, "tokens read", lambda piece: len(piece[0])):
        parts.append(ids)
        if last:
            ids_of[next(waiting)] = np.concatenate(parts)
            parts = []
    known: set[int] = set()
    read: list[_Read] = []

    @cache
    def text_of(piece: Piece) -> _Text:
        if piece.has_raw:
            wide, parts = piece.encoded(tokenizer)
            return _Text(piece, wide.astype(np.int32), parts)
        ids = ids_of[piece.text]
        return _Text(piece, ids, [(0, len(ids))])

    for request in requests:
        prompt = tuple(map(text_of, request.prompt))
        reply = sum(len(ids_of[piece.text]) for piece in request.reply)
        if len(prompt) == 1 and prompt[0].piece.role == "text" and len(prompt[0].ids) > _LONG:
            text, place = prompt[0], request.conversation
            parts = np.split(text.ids, range(_LONG, len(text.ids), _LONG))
            for n, ids in enumerate(parts):
                part = replace(text, ids=ids, parts=[(0, len(ids))])
                read.append(_Read(f"{place} {n}", (part,), 0, 0))
            continue
        whole = np.concatenate([text.ids for text in prompt])
        read.append(_Read(request.conversation, prompt, _cached(whole, known), reply))
    return read


def _cached(ids: Ids, known: set[int]) -> int:
    """Return how many first tokens were read before, in whole blocks; add these to the known."""
    chain = cached = 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        chain = hash((chain, ids[start : start + BLOCK].tobytes()))  # of all up to here
        if chain in known:
            cached += BLOCK
        known.add(chain)
    return cached


def _savings(
    read: Sequence[_Read],
    unseen: Sequence[_Read],
    held: set[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterable[Saving]:
    """Choose spans in the conversations that are not held out; measure them in those that are."""
    seen: dict[tuple[str, bytes], _Text] = {}  # every text of a conversation once
    for request in read:
        if request.conversation not in held:
            for text in request.prompt:
                if text.piece.role != RAW:
                    seen.setdefault((request.conversation, text.ids.tobytes()), text)
    step = -(-sum(len(text.ids) for text in seen.values()) // _CHOICE_TOKENS)
    some = list(seen.values())[:: max(1, step)]  # of a large log evenly spread texts
    segments = [ids for text in some for ids in text.segments()]
    rules, ids, offsets = candidate_spans(segments, tokenizer, LONGEST[-1])
    of_role: dict[str, int] = {}
    for request in unseen:
        for text in request.prompt:
            of_role[text.piece.role] = of_role.get(text.piece.role, 0) + len(text.ids)
    total = sum(of_role.values())
    if not total:
        return
    prompts = [pair for request in unseen for pair in request.segments()]
    new = [pair for request in unseen for pair in request.segments(request.cached)]
    rest = total - sum(request.cached for request in unseen)
    for longest in LONGEST:
        chosen = rules.take(rules.sizes <= longest)
        for rows in sorted(ROWS, reverse=True):
            chosen = choose_spans(chosen, ids, offsets, rows)
            matcher = Matcher(chosen)
            by_role = _saved(matcher, prompts)
            yield Saving(
                longest=longest,
                rows=rows,
                spans=len(chosen),
                all=sum(by_role.values()) / total,
                uncached=sum(_saved(matcher, new).values()) / max(1, rest),
                roles={role: by_role[role] / of_role[role] for role in by_role},
            )


def _saved(matcher: Matcher, segments: Sequence[tuple[str, Ids]]) -> dict[str, int]:
    """Return by role how many tokens the matched spans save."""
    saved: dict[str, int] = {}
    for role in dict.fromkeys(role for role, _ in segments):
        ids, offsets = flat([ids for owner, ids in segments if owner == role])
        starts, _, _ = matcher.segment_many(ids, offsets)
        saved[role] = len(ids) - len(starts)
    return saved


def _memory(
    name: str, shape: BackboneShape, gpu_gib: float, prompt: float, reply: float, saved: float
) -> Memory:
    token_bytes = 2 * 2 * shape.layers * shape.kv_width
    free = _FREE * gpu_gib * 2**30 - 2 * shape.weights
    rule = f"{name} must fit a GPU, its weights in 16 bits"
    found = f"{2 * shape.weights / 2**30:.1f} GiB on {gpu_gib:g}"
    remedy = "Name a larger --gpu-gib: that of all its GPUs."
    require(free > 0, CorpusError, rule, found, remedy)
    raw, merged = (free / (token_bytes * (n + reply)) for n in (prompt, prompt * (1 - saved)))
    return Memory(name, gpu_gib, token_bytes, requests=int(raw), merged=int(merged))


def _verdict(
    best: Saving | None, tokens: dict[str, dict[str, int]], digits: float, cached: float
) -> tuple[bool, str]:
    if best is None:
        return False, "Not known: savings need at least two conversations with text that may merge."
    total = sum(sum(kinds.values()) for kinds in tokens.values())
    raw = sum(tokens.get(RAW, {}).values()) / total
    saved = (
        f"spans of up to {best.longest} tokens save {best.all:.0%} of the prompt tokens of unseen "
        f"requests, {best.uncached:.0%} of those that a warm prefix cache does not serve"
    )
    share = {role: sum(tokens[role].values()) * s for role, s in best.roles.items()}
    role = max(share, key=share.__getitem__, default=RAW)
    if best.uncached >= _PAYS:
        return True, f"It pays: {saved}; most of it in {NAMES[role]}."
    if cached >= 1 - _PAYS:
        why = f"a prefix cache serves {cached:.0%} of the prompts already"
    elif raw >= 0.5:
        why = f"{raw:.0%} of the tokens are earlier replies, which stay raw"
    elif digits >= 0.25:
        why = f"{digits:.0%} of the tokens hold digits, which stay raw"
    else:
        why = f"the text repeats too little, {NAMES[role]} most"
    return False, f"It does not pay: {saved}; {why}."
