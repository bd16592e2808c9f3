"""Tokenizers of GGUF files give the ids, the text and the chats of the published tokenizers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from support.gguf_files import SPECIAL, tiny_bpe, write_gguf
from support.tiny_models import random_model, tiny_config
from umim_core.backbone.tokenizer_files import load_tokenizer, tokenizer_fingerprint
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.gguf_tokenizer import PRE_TOKENIZERS

DATA = Path(__file__).parents[3] / "shared" / "data"
SMOLLM2, GPT2 = DATA / "tokenizers" / "smollm2", DATA / "tokenizers" / "gpt2"
PER_FILE, CUT = 3, 400  # lines of a file and characters of a text in the quick set
published = pytest.mark.skipif(
    not SMOLLM2.is_dir(), reason="no published tokenizers (shared/data/tokenizers)"
)
# What the parts of a byte-level tokenizer treat apart, on its own and next to each other.
AWKWARD = [
    "the  24 of 1234567 and 3.14e-10, x2 = 07:45",
    "   leading, trailing   ",
    '\n\n\tdef f():\r\n        return \'１２３\' + """x"""\n',
    "I'm, WE'LL, they'Ve; naïve cafe\u0301 ＡＢ ½ Ⅻ ٣٤ ๕",
    "日本語のテキスト、한국어 👩🏽\u200d🚀 \u00a0\u3000\u2028 \ufeff\x00\x7f",
    "".join(f"{token} {token}a" for token in SPECIAL),
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|",
]


def from_gguf(folder: Path, pipeline: dict[str, Any], pre: str, **options: Any) -> str:
    """Write a GGUF file with a tokenizer and a model of no matter, and convert it."""
    size = len(pipeline["model"]["vocab"]) + len(pipeline["added_tokens"])
    config = tiny_config("llama", vocab_size=size, hidden_size=8, tie_word_embeddings=True)
    source = write_gguf(folder / "m.gguf", random_model(config), pipeline, pre, **options)
    out = folder / "out"
    out.mkdir()
    convert_gguf(source, out)
    return str(out)


def texts(limit: int | None = None) -> Iterator[str]:
    """Texts of every file of the data folder; with a limit, so many from all over each, cut."""
    for path in sorted(DATA.rglob("*")):
        if path.suffix not in (".txt", ".jsonl", ".gz", ".md", ".tokens"):
            continue
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as stream:
            lines = list(islice(stream, None if limit is None else 40 * limit))
        step = 1 if limit is None else max(1, len(lines) // limit)
        for line in lines[::step]:
            for text in _strings(json.loads(line)) if "jsonl" in path.name else [line]:
                yield text if limit is None else text[:CUT]


def _strings(value: object) -> Iterator[str]:
    """Strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def assert_equal(ours: Tokenizer, theirs: Tokenizer, batch: list[str]) -> None:
    """Both give every text the same ids, and read them back."""
    ids = [encoding.ids for encoding in ours.encode_batch_fast(batch)]
    assert ids == [encoding.ids for encoding in theirs.encode_batch_fast(batch)]
    assert ours.decode_batch(ids) == theirs.decode_batch(ids)


@published
def test_smollm2_is_the_published_tokenizer_with_its_ids_and_chats(tmp_path: Path) -> None:
    pipeline = json.loads((SMOLLM2 / "tokenizer.json").read_text(encoding="utf-8"))
    roles = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    template = (SMOLLM2 / "chat_template.jinja").read_text(encoding="utf-8")
    ours = load_tokenizer(from_gguf(tmp_path, pipeline, "smollm", roles=roles, template=template))
    theirs = load_tokenizer(str(SMOLLM2))
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    batch = [*AWKWARD, *texts(PER_FILE)]
    assert_equal(ours.backend_tokenizer, theirs.backend_tokenizer, batch)
    chat = [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Who wrote  24 books?"},
        {"role": "assistant", "content": "Moi."},
        {"role": "user", "content": "Indeed.\n"},
    ]
    for turns in (chat, chat[1:]):
        for prompt in (True, False):
            options = {"tokenize": False, "add_generation_prompt": prompt}
            written = ours.apply_chat_template(turns, **options)
            assert written == theirs.apply_chat_template(turns, **options)


@published
def test_gpt_2_gives_the_published_ids(tmp_path: Path) -> None:
    pipeline = json.loads((GPT2 / "tokenizer.json").read_text(encoding="utf-8"))
    out = from_gguf(tmp_path, pipeline, "gpt-2", roles={"bos": 50256, "eos": 50256})
    ours, theirs = (Tokenizer.from_file(str(Path(p) / "tokenizer.json")) for p in (out, GPT2))
    assert_equal(ours, theirs, [*AWKWARD, *texts(1)])


def test_qwen_2_is_the_tokenizer_that_transformers_builds(tmp_path: Path) -> None:
    pipeline = tiny_bpe()
    ours = load_tokenizer(from_gguf(tmp_path, pipeline, "qwen2"))
    merges = [tuple(merge) for merge in pipeline["model"]["merges"]]
    theirs = Qwen2Tokenizer(vocab=pipeline["model"]["vocab"], merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert_equal(ours.backend_tokenizer, theirs.backend_tokenizer, AWKWARD)


@pytest.mark.parametrize("name", ["llama-bpe", "dbrx"])
def test_llama_3_splits_as_the_published_expression_does(name: str) -> None:
    pieces = json.loads(PRE_TOKENIZERS[name].pieces.__getstate__())
    assert pieces["pretokenizers"][0]["pattern"] == {"Regex": TikTokenConverter("").pattern}


@pytest.mark.parametrize(
    ("pre", "entries", "wanted"),
    [
        ("smollm", {}, []),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, [1]),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, []),
    ],
)
def test_texts_start_with_the_token_that_the_file_asks_for(
    pre: str, entries: dict[str, Any], wanted: list[int], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(from_gguf(tmp_path, tiny_bpe(), pre, entries=entries))
    bare = tokenizer("A cat", add_special_tokens=False)["input_ids"]
    assert tokenizer("A cat")["input_ids"] == [*wanted, *bare]


@pytest.mark.parametrize("first", ["$", ":"])
def test_a_first_token_may_hold_the_signs_of_a_template(first: str, tmp_path: Path) -> None:
    pipeline = tiny_bpe()
    wanted = pipeline["model"]["vocab"][first]
    entries = {"tokenizer.ggml.add_bos_token": True}
    out = from_gguf(tmp_path, pipeline, "smollm", roles={"bos": wanted}, entries=entries)
    tokenizer = load_tokenizer(out)
    bare = tokenizer("A cat", add_special_tokens=False)["input_ids"]
    assert tokenizer("A cat")["input_ids"] == [wanted, *bare]


def test_ends_of_turns_end_a_generation_too(tmp_path: Path) -> None:
    out = from_gguf(tmp_path, tiny_bpe(), "gpt-2", roles={"eos": 0})
    assert json.loads((Path(out) / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
