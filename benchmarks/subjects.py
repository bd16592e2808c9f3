"""Subjects of the benchmarks: ids of a text, backbones with their rules, text to time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.devices import usable_device
from umim_core.backbone.model_files import DTYPES
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import fresh_module
from umim_core.config.form import ModuleForm
from umim_core.config.rule_options import RuleOptions
from umim_core.embedded.docstring_corpus import build_corpus, held_out_text
from umim_core.errors import ArtifactError, CorpusError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.mining.counting import count_ngrams
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.task_sets.docstrings import read_documents
from umim_core.text.sources import JsonLines
from umim_core.text.token_ids import segment_borders
from umim_core.text.tokens import first_ids, tokenize_parts

RANDOM: Final = "random-llama"
BACKBONES: Final = (RANDOM, "umim-docs-llama", "umim-docs-gpt2")
CHECKPOINT: Final = "umim-smollm2-135m"
GENERAL: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "general"
PASSAGE: Final = 64  # tokens
SEGMENT: Final = 512
EMBEDDED: Final = "umim-docs-llama"
DOCSTRINGS: Final = Path(".umim/benchmarks/docstrings.npy")
Ids = NDArray[np.int64]
_PHRASES: Final = 4_000
_TAU: Final = 5
_MINED: Final = 400_000  # tokens that the rules of the random backbone are mined on
_RANDOM_CONFIG: Final = LlamaConfig(  # realistic proportions
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=8192,
)


@dataclass(frozen=True)
class Subject:
    """A model with its natural rules, and text [T] to time that they were not mined on."""

    merged_model: MergedModel
    ids: Ids
    text: str = ""  # what it is, if not that of the small backbones

    @property
    def backbone(self) -> Backbone:
        return self.merged_model.backbone


def subject(name: str, tokens: int, *, dtype: str, device: str) -> Subject:
    if name == RANDOM:
        return random_subject(_RANDOM_CONFIG, tokens, dtype=dtype, device=usable_device(device))
    umim = UMIM.from_pretrained(name, dtype=dtype, device=device)
    files = [] if name in BACKBONES else sorted(GENERAL.glob("*-test.jsonl.gz"))
    if files:
        return Subject(umim.merged_model, *general_text(umim, files, tokens))
    ids = np.array(umim.backbone.encode(held_out_text())[:tokens], dtype=np.int64)
    text = "" if name in BACKBONES else "docstrings of the installed packages, test split"
    return Subject(umim.merged_model, ids, text)


def general_text(umim: UMIM, files: Sequence[Path], tokens: int) -> tuple[Ids, str]:
    """Return passages of every kind of text in turn as ids, and what text this is."""
    tokenizer = umim.backbone.require_tokenizer()
    passages = -(-tokens // (PASSAGE * len(files)))
    size = passages, PASSAGE
    kinds = [
        np.resize(first_ids(JsonLines(paths=(str(file),)), tokenizer, passages * PASSAGE), size)
        for file in files
    ]
    names = ", ".join(file.name.removesuffix("-test.jsonl.gz") for file in files)
    ids = np.stack(kinds, axis=1).reshape(-1).astype(np.int64)
    return ids, f"general English ({names}), test split, passages of {PASSAGE} tokens in turn"


def random_backbone(config: LlamaConfig, *, dtype: str, device: torch.device | str) -> Backbone:
    """Return a backbone of random weights, made on its device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers' own
            config, dtype=DTYPES[dtype], trust_remote_code=False
        )
    return wrap_backbone(model, None)


def random_subject(
    config: LlamaConfig, tokens: int, *, dtype: str, device: torch.device | str, mined: int = _MINED
) -> Subject:
    """Return a backbone of random weights, a fresh module, and rules mined on random phrases."""
    backbone = random_backbone(config, dtype=dtype, device=device)
    text = phrase_text(mined + tokens, config.vocab_size)
    options = RuleOptions(tau=_TAU)
    counts = count_ngrams(*whole_segments(text[:mined].astype(np.int32)), options.tau)
    rules = RuleSet.from_counts(counts, RuleOrigin(options=options))
    module = fresh_module(backbone, rules, ModuleForm(), seed=0).requires_grad_(False)
    return Subject(MergedModel(backbone, module, Matcher(rules)), text[mined:])


def phrase_text(tokens: int, vocab: int) -> Ids:
    """Return text of single tokens and phrases of 2 to 4, both with frequencies of Zipf's law."""
    generator = np.random.default_rng(0)
    phrases = [generator.integers(0, vocab, size=n) for n in generator.integers(2, 5, _PHRASES)]
    parts: list[Ids] = []
    length = 0
    while length < tokens:
        if generator.random() < 0.75:
            part = (generator.zipf(1.2, 1) - 1) % vocab
        else:
            part = phrases[(int(generator.zipf(1.2)) - 1) % _PHRASES]
        parts.append(part.astype(np.int64))
        length += len(part)
    return np.concatenate(parts)[:tokens]


def docstring_ids() -> Path:
    """Return the file of the training docstrings' ids; it is built once, in minutes."""
    file = DOCSTRINGS.resolve()
    if not file.exists():
        with tempfile.TemporaryDirectory(prefix="docstrings-") as folder:
            build_corpus(Path(folder) / "built", workers=2)
            documents = read_documents(Path(folder) / "built" / "train.jsonl")
            texts = ((one.text, True) for one in documents)
            ids = [ids for ids, _ in tokenize_parts(texts, load_tokenizer(EMBEDDED))]
        save_array(file, np.concatenate(ids).astype(np.uint32))
    return file


def open_ids(path: Path) -> NDArray[np.integer]:
    """Map a file of ids into memory."""
    rule, remedy = f"{path} must be a flat .npy array of integers", "Write one with numpy.save."
    try:
        ids = open_array(path)
    except ArtifactError as error:
        raise CorpusError(rule, error.value, remedy) from error
    require(ids.ndim == 1 and ids.dtype.kind in "iu", CorpusError, rule, ids.shape, remedy)
    return ids


def whole_segments(ids: NDArray[np.integer]) -> tuple[NDArray[np.integer], range]:
    """Return ids without the remainder of a segment, and the borders."""
    borders = segment_borders(len(ids), SEGMENT)
    return ids[: borders[-1]], borders
