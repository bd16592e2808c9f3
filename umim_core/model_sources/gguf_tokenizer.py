"""Tokenizers of GGUF files: byte-level BPE, rebuilt to give the ids of the published tokenizer.

A GGUF file holds vocabulary and merges, but of normaliser and pre-tokenizer the name only, in
``tokenizer.ggml.pre``. The names below are those that llama.cpp splits by the same expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from umim_core.errors import BackboneError, did_you_mean, require
from umim_core.model_sources.gguf_file import DAMAGED, DIRECTORY_INSTEAD, GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
ROLES: Final = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Ends of a turn that chat templates write; a model that was trained on them stops there.
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenizer and settings that a name in ``tokenizer.ggml.pre`` stands for.

    Attributes:
        ignore_merges: Whether a piece that is a token is taken whole, whatever the merges say.
        add_bos: Whether texts start with the first token if the file does not say.
    """

    pieces: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _splitting(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


_byte_level: Final = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
_GPT2: Final = PreTokenizer(_byte_level())
_DIGITS: Final = PreTokenizer(
    pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
)
_QWEN2: Final = PreTokenizer(_splitting(""), normalizers.NFC())
_TIKTOKEN: Final = PreTokenizer(_splitting("{1,3}"))
_LLAMA3: Final = PreTokenizer(_TIKTOKEN.pieces, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: Final = {
    "dbrx": _TIKTOKEN,
    "falcon3": _LLAMA3,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "smaug-bpe": _TIKTOKEN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}


@dataclass(frozen=True)
class GgufTokenizer:
    pipeline: dict[str, Any]
    settings: dict[str, Any]
    roles: dict[str, int]
    stops: tuple[int, ...]
    chat_template: str


def read_tokenizer(file: GgufFile) -> GgufTokenizer:
    tokens = file.texts("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    rule = "every token of a GGUF file must have a type"
    _check(len(kinds) == len(tokens), rule, f"{len(kinds)} for {len(tokens)}")
    pre = _pre_tokenizer(file)
    ids = {role: _role(file, name, len(tokens)) for role, name in ROLES.items()}
    template = file.text("tokenizer.chat_template", "")
    settings: dict[str, Any] = {"backend": "tokenizers", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": None if i is None else tokens[i] for role, i in ids.items()}
    settings["tokenizer_class"] = "TokenizersBackend"
    vocabulary = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED
    }
    rule = "the tokens of a GGUF file must differ from each other"
    _check(len(vocabulary) == len(tokens) - kinds.count(_UNUSED), rule, "one stands there twice")
    merges = _merges(file, vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    tokenizer.decoder = ByteLevel()
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre.pieces, pre.normalizer
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    around = _ends(file, pre, ids, tokens)
    if around is not None:
        tokenizer.post_processor = around
    return GgufTokenizer(
        pipeline=json.loads(tokenizer.to_str()),
        settings=settings,
        roles={f"{role}_token_id": i for role, i in ids.items() if i is not None and role != "unk"},
        stops=_stops(file, ids["eos"], tokens, kinds, template),
        chat_template=template,
    )


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    model = file.text("tokenizer.ggml.model")
    rule = "the tokenizer of a GGUF file must be byte-level BPE (tokenizer.ggml.model gpt2)"
    _check(model == "gpt2", rule, f"{file.path} has {model!r}", DIRECTORY_INSTEAD)
    name = file.text("tokenizer.ggml.pre")
    rule = f"tokenizer.ggml.pre of a GGUF file must be one of {', '.join(PRE_TOKENIZERS)}"
    remedy = did_you_mean(name, PRE_TOKENIZERS) or DIRECTORY_INSTEAD
    _check(name in PRE_TOKENIZERS, rule, name, remedy)
    return PRE_TOKENIZERS[name]


def _role(file: GgufFile, name: str, size: int) -> int | None:
    """Return the id of the token in a role, or None if no token has it."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token = file.integer(key)
    _check(0 <= token < size, f"{key} of a GGUF file must be below {size}", token)
    return token


def _ends(
    file: GgufFile, pre: PreTokenizer, ids: dict[str, int | None], tokens: list[str]
) -> TemplateProcessing | None:
    """Return the template that puts the first and last token around a text, or None."""
    bos = ids["bos"] if file.flag("tokenizer.ggml.add_bos_token", pre.add_bos) else None
    eos = ids["eos"] if file.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    # A template parses names: of a token with a sign of its own, the id stands for it.
    names = {
        i: f"id {i}" if ":" in tokens[i] or tokens[i][:1] == "$" else tokens[i]
        for i in (bos, eos)
        if i is not None
    }
    first, last = ([] if i is None else [names[i]] for i in (bos, eos))
    single, second = [*first, "$A", *last], [f"{part}:1" for part in (*first, "$B", *last)]
    special = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for i, name in names.items()]
    return TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _stops(
    file: GgufFile, eos: int | None, tokens: list[str], kinds: list[int], template: str
) -> tuple[int, ...]:
    """Return the ids at which a generation ends: the file's, and the ends of turns it writes."""
    named = [_role(file, name, len(tokens)) for name in ("eot", "eom")]
    turns = [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL and token in _TURN_ENDS and token in template
    ]
    return tuple(sorted({i for i in (eos, *named, *turns) if i is not None}))


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        joins = bool(space) and vocabulary.keys() >= {left, right, left + right}
        _check(joins, "the merges of a GGUF file must join two tokens to a third", merge)
        pairs.append((left, right))
    return pairs


def tokens_by_id(
    vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], rows: int
) -> tuple[list[str], list[int]]:
    """Return the tokens of a GGUF file and their types, one for each row of the embedding."""
    tokens, kinds = [f"<|unused_{i}|>" for i in range(rows)], [_UNUSED] * rows
    for token, i in vocabulary.items():
        tokens[i], kinds[i] = token, _NORMAL
    for entry in added:
        kinds[entry["id"]] = _CONTROL if entry["special"] else _USER_DEFINED
    return tokens, kinds


def _check(ok: bool, rule: str, value: object, remedy: str = DAMAGED) -> None:
    require(ok, BackboneError, rule, value, remedy)
