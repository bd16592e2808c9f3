"""Forecast of mining a source, from a part of it."""

from __future__ import annotations

import re
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.cost.mining_law import MIN_SEGMENTS, SAMPLE_TOKENS, fit_mining_law
from umim_core.cost.prediction import Prediction
from umim_core.errors import ConfigError, CorpusError, UnknownSizeError
from umim_core.mining.candidates import SAMPLE_TAU
from umim_core.mining.counting import thread_count
from umim_core.mining.mining_options import MiningOptions, SearchOptions
from umim_core.mining.preparation import excluded_ids
from umim_core.text.files import CorpusFile, expand, typed_errors
from umim_core.text.sources import JsonLines, Source, TextFiles, TokenIds
from umim_core.text.token_ids import Offsets, Tokens, UniformOffsets
from umim_core.text.tokens import first_ids, open_token_ids

_SAMPLE_BYTES: Final = 10 << 20
_SMALL: Final = 1 << 11  # tokens; mined before a sample is counted
_PACKED: Final = (".gz", ".zst")


class Sample(NamedTuple):
    """Tokens from a corpus.

    Attributes:
        ids: Some of its ids [S].
        total: Tokens of the whole corpus, as far as they are known.
        seconds_per_token: Time of tokenizing.
    """

    ids: Tokens
    total: int
    seconds_per_token: float


def predict_mining(
    source: Source,
    *,
    tokenizer: str | None,
    options: MiningOptions,
    revision: str | None = None,
    tokens: int | None = None,
    at_most: int | None = None,
    workers: int | None = None,
    block_tokens: int | None = None,
) -> Prediction | None:
    """Predict the cost of mining a source, from about 10 MB of its text.

    Args:
        source: Text, or ready token ids.
        tokenizer: Name of the tokenizer; may be None for ready ids.
        options: How it is to be mined.
        revision: Revision of the tokenizer on the hub.
        tokens: Tokens of the corpus, where they do not follow from the sizes of its files:
            compressed ones, Parquet, data sets.
        at_most: Tokens after which mining stops; None for no limit.
        workers: Workers of a cluster, each of one thread; None for one process.
        block_tokens: Tokens that a worker counts at a time; None for the default.

    Returns:
        The prediction; None for a corpus that is too small for one and mined in seconds.

    Raises:
        ConfigError: If the number of tokens is needed and not given, or an option is out of bounds.
        CorpusError: If the source is unusable.
    """
    chosen = options.check()
    if tokens is not None and tokens < 1:
        raise ConfigError("tokens must be at least 1", tokens, "Leave it out or raise it.")
    known = None if tokenizer is None else load_tokenizer(tokenizer, revision=revision)
    sample = _sample(source, known, tokens, at_most)
    total = sample.total if at_most is None else min(sample.total, at_most)
    prediction = predict_search(
        sample.ids,
        UniformOffsets(chosen.segment_length, len(sample.ids) // chosen.segment_length),
        excluded_ids(known, chosen.protect),
        chosen.search,
        tokens=total,
        threads=thread_count(chosen.threads if workers is None else 1),
        workers=workers,
        block_tokens=block_tokens,
    )
    if prediction is None:
        return None
    tokenizing = {"tokenize": sample.seconds_per_token * total}
    return replace(prediction, seconds=tokenizing | prediction.seconds)


def predict_search(
    ids: Tokens,
    offsets: Offsets,
    excluded: tuple[int, ...],
    options: SearchOptions,
    *,
    tokens: int,
    threads: int = 1,
    workers: int | None = None,
    block_tokens: int | None = None,
) -> Prediction | None:
    """Predict the cost of finding n-grams, from a sample that is counted now.

    Args:
        ids: Token ids [T], of which a sample is counted.
        offsets: Their segment borders.
        excluded: Ids that take part in no n-gram.
        options: What is to be found.
        tokens: Tokens of the whole corpus.
        threads: Threads of this process, or of a worker.
        workers: Workers of a cluster; None for this process.
        block_tokens: Tokens that a worker counts at a time; None for the default.

    Returns:
        The prediction; None for a corpus of two thousand tokens.
    """
    if tokens < _SMALL:
        return None
    if len(offsets) - 1 < MIN_SEGMENTS:  # long segments: borders hardly change how tables grow
        length = len(ids) // MIN_SEGMENTS
        if length < 2:
            return None
        offsets = UniformOffsets(length, MIN_SEGMENTS)
    exact = options.counted_tokens(tokens) == tokens
    law = fit_mining_law(
        ids,
        offsets,
        options.tau if exact else SAMPLE_TAU,
        excluded,
        threads=threads,
        seed=options.seed,
        resident_bytes=peak_memory_bytes,
    )
    return law.predict(tokens, options, workers=workers, block_tokens=block_tokens)


def peak_memory_bytes() -> float:
    """Return the largest resident memory of this process so far.

    On Linux the kernel's mark of this address space: ``ru_maxrss`` begins with the parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"))
        if peak is not None:
            return 1024.0 * int(peak.group(1))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _sample(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int | None,
    at_most: int | None,
) -> Sample:
    if isinstance(source, TokenIds):
        array = open_token_ids(source)
        return Sample(array, len(array), 0.0)
    if isinstance(source, TextFiles | JsonLines):
        files = expand(source.paths)
        if all(file.suffix not in _PACKED for file in files):
            return _sample_of_bytes(source, files, tokenizer, tokens)
    began = time.perf_counter()
    ids, whole = first_ids(source, tokenizer, SAMPLE_TOKENS)
    known = tokens or at_most
    if known is None and not whole:
        raise UnknownSizeError(
            "the number of tokens must be given where the files do not tell it",
            f"a source of kind {source.kind}, compressed or not plain text",
            "Give it with --tokens, e.g. 0.25 times the bytes of English text.",
        )
    total = len(ids) if whole or known is None else known
    return Sample(ids, total, (time.perf_counter() - began) / max(len(ids), 1))


def _sample_of_bytes(
    source: TextFiles | JsonLines,
    files: list[CorpusFile],
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: int | None,
) -> Sample:
    """Tokenize the heads of files in random order, and scale by the bytes."""
    sizes = [file.size for file in files]
    share = max(_SAMPLE_BYTES // 16, _SAMPLE_BYTES // len(files))
    read = 0
    with tempfile.TemporaryDirectory(prefix="umim-sample-") as folder:
        heads: dict[str, CorpusFile] = {}
        for number in np.random.default_rng(0).permutation(len(files)):
            room = _SAMPLE_BYTES - read if len(files) == 1 else min(share, _SAMPLE_BYTES - read)
            head = _head(files[number], sizes[number], room, source)
            copy = Path(folder) / f"{number}.head"
            copy.write_bytes(head)
            heads[str(copy)] = files[number]
            read += len(head)
            if read >= _SAMPLE_BYTES:
                break
        began = time.perf_counter()
        try:
            copies = source.model_copy(update={"paths": tuple(heads)})
            ids, _ = first_ids(copies, tokenizer, sys.maxsize)
        except CorpusError as error:
            raise _about_files(error, heads) from error
        seconds = time.perf_counter() - began
    total = tokens if tokens is not None else round(sum(sizes) * len(ids) / max(read, 1))
    return Sample(ids, total, seconds / max(len(ids), 1))


def _about_files(error: CorpusError, heads: dict[str, CorpusFile]) -> CorpusError:
    """Name the files in an error about their heads; lines and bytes are the same in both."""
    rule, value = error.rule, str(error.value)
    for head, file in heads.items():
        rule, value = rule.replace(head, str(file)), value.replace(head, str(file))
    return CorpusError(rule, value, error.remedy)


def _head(file: CorpusFile, size: int, room: int, source: TextFiles | JsonLines) -> bytes:
    """Return up to ``room`` bytes of a file, cut after a line, or for text after a space."""
    with file.open() as stream, typed_errors(file):
        head = stream.read(room)
        if len(head) == size:
            return head
        if isinstance(source, JsonLines) and b"\n" not in head:
            return head + stream.readline()
    cut = max(head.rfind(b"\n"), -1 if isinstance(source, JsonLines) else head.rfind(b" "))
    return head[: cut + 1] if cut >= 0 else head.decode(errors="ignore").encode()
