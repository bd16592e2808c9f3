"""Choice of the next token and the end of a row, on raw ids, by transformers' own code.

Merging never shows here: processors, stop strings and criteria get the prompt's and the generated
raw ids, so a repetition penalty means what it means in ``transformers.generate``.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from operator import index
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import float64_device
from umim_core.encodable import encoding_error
from umim_core.errors import GenerationError, NumericalError, require
from umim_core.merging.likelihood import widened

# Settings, in transformers' own order: the values without effect and what makes the processor.
# The first table's need a row's ids, the second's do not; the third's count when sampling only.
_Factory = Callable[[Any], LogitsProcessor]
_Table = dict[str, tuple[tuple[object, ...], _Factory]]
ON_IDS: Final[_Table] = {
    "sequence_bias": ((None,), SequenceBiasLogitsProcessor),
    "repetition_penalty": ((None, 1.0), RepetitionPenaltyLogitsProcessor),
    "no_repeat_ngram_size": ((None, 0), NoRepeatNGramLogitsProcessor),
}
PLAIN: Final[_Table] = {"suppress_tokens": ((None,), SuppressTokensLogitsProcessor)}
WARPERS: Final[_Table] = {
    "temperature": ((None, 1.0), TemperatureLogitsWarper),
    "top_k": ((None, 0), TopKLogitsWarper),
    "top_p": ((None, 1.0), TopPLogitsWarper),
    "min_p": ((None,), MinPLogitsWarper),
    "typical_p": ((None, 1.0), TypicalLogitsWarper),
    "epsilon_cutoff": ((None, 0.0), EpsilonLogitsWarper),
    "eta_cutoff": ((None, 0.0), EtaLogitsWarper),
}
_REALS: Final = ("repetition_penalty", "temperature")  # transformers takes no 2 for 2.0
StopReason = Literal["eos", "stop_string", "criteria", "length"]


class History:
    """The ids of rows, so that a token costs one id to convert and not T."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known = defaultdict[int, "array[int]"](lambda: array("q"))

    def row(self, number: int, raw_ids: Sequence[int]) -> torch.LongTensor:
        """Return a row's ids [T] as [1, T]; those of earlier calls are not read again."""
        known = self._known[number]
        known.extend(raw_ids[len(known) :])
        ids = torch.from_numpy(np.array(known))[None]
        return cast("torch.LongTensor", ids.to(self._device))


class TokenChooser:
    """Choose one token per row from its logits.

    Each row samples from a stream of its own, made from the seed and the stream's number: what a
    row draws does not depend on the other rows or on when they finish. A ``top_k`` of 1 is the
    greedy choice: the first of equal logits, where transformers draws one of them.

    Args:
        config: What ``GenerateOptions.check`` returns.
        prompt_lengths: Raw prompt tokens per row, which ``min_new_tokens`` counts from.
        seed: None draws one from torch's global generator if rows are sampled.
        processors: Applied behind those of ``config`` and before the warpers, as in transformers.
            Each is called once per row with that row's raw ids [1, T].
        past_lengths: Raw tokens per row of earlier turns, so that a turn draws numbers of its own.
        streams: Number of each row's stream; 0, 1, 2, ... if None.
        device: Where the logits will be.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt_lengths: Sequence[int],
        seed: int | None,
        processors: LogitsProcessorList | None = None,
        *,
        past_lengths: Sequence[int] | None = None,
        streams: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._sample = bool(config.do_sample) and config.top_k != 1
        ends = eos_ids(config.eos_token_id)

        def made(name: str, factory: _Factory) -> LogitsProcessor:
            value = getattr(config, name)
            try:
                if isinstance(value, float) and math.isnan(value):  # lies within all bounds
                    raise ValueError("it must be a number")
                whole = type(value) is int and name in _REALS
                return factory(float(value) if whole else value)
            except (OverflowError, TypeError, ValueError) as error:
                rule = f"the sampling setting {name} is out of range: {str(error).rstrip('.')}"
                remedy = "Correct it, or leave it out."
                raise GenerationError(rule, repr(value), remedy) from error

        def from_table(table: _Table) -> list[LogitsProcessor]:
            rows = table.items()
            return [
                made(n, factory) for n, (same, factory) in rows if getattr(config, n) not in same
            ]

        on_ids, plain = from_table(ON_IDS), from_table(PLAIN)
        if config.bad_words_ids is not None:
            words = made("bad_words_ids", lambda ids: NoBadWordsLogitsProcessor(ids, ends))
            on_ids.append(words)
        until: dict[str, Any] = {"eos_token_id": ends, "device": str(device)}
        if config.min_length and ends:  # it counts the prompt
            on_ids.append(made("min_length", partial(MinLengthLogitsProcessor, **until)))
        by_row = [list(on_ids) for _ in prompt_lengths]
        if config.min_new_tokens and ends:
            for row, length in zip(by_row, prompt_lengths, strict=True):
                longer = partial(MinNewTokensLengthLogitsProcessor, length, **until)
                row.append(made("min_new_tokens", longer))
        self._foreign = bool(processors)
        uniform = not processors and not any(by_row)
        # Rows have their own ids and lengths, and padding would be penalised: one call a row.
        behind = [*plain, *(processors or ())]
        self._per_row = [] if uniform else [LogitsProcessorList([*row, *behind]) for row in by_row]
        warpers = from_table(WARPERS) if config.do_sample else []  # refuses what is out of range
        self._on_all = LogitsProcessorList(
            [*(plain if uniform else ()), *(warpers if self._sample else ())]
        )
        self._history = History(device)
        if self._sample:
            key, pasts = fresh_seed() if seed is None else seed, past_lengths or [0] * len(by_row)
            numbers = range(len(by_row)) if streams is None else streams
            self._generators = [_stream(key, *row) for row in zip(numbers, pasts, strict=True)]

    def choose(
        self,
        logits: Tensor,
        raw_ids: Sequence[Sequence[int]],
        running: Sequence[bool] | None = None,
    ) -> list[int]:
        """Choose the next token of every row by its logits [B, V].

        ``raw_ids`` are those of prompt and output per row, of any length; the choice of rows that
        are not ``running`` does not count.
        """
        scores = widened(logits)
        if self._foreign:  # one of them may write into its scores; the logits are still to report
            scores = scores.clone()
        try:
            scores = self._processed(scores, raw_ids)
        except ValueError as error:  # some of transformers' check their settings here
            rule = "a logits processor refused its input"
            raise GenerationError(rule, str(error), "Correct its settings.") from error
        scores = scores.to(float64_device(scores.device))
        best = scores.max(dim=-1)
        chosen = self._draw(scores) if self._sample else best.indices
        # One read for both: it waits for the device. Ids are exact in float64.
        highest, tokens = torch.stack([best.values.double(), chosen.double()]).tolist()
        for b, value in enumerate(highest):
            # A processor may force a token by infinity; its probability would be no number.
            fails = math.isnan(value) or value == -math.inf or (self._sample and value == math.inf)
            ended = running is not None and not running[b]
            rule = "every row must have a token with a finite score"
            remedy = "Allow more tokens, or look for NaN in the backbone's weights."
            found = f"row {b}: highest score {value}"
            require(ended or not fails, NumericalError, rule, found, remedy)
        return [int(token) for token in tokens]

    def _processed(self, scores: Any, raw_ids: Sequence[Sequence[int]]) -> Tensor:
        if self._per_row:
            pairs = zip(self._per_row, raw_ids, strict=True)
            rows = [
                processors(self._history.row(b, ids), scores[b : b + 1])
                for b, (processors, ids) in enumerate(pairs)
            ]
            scores = torch.cat(rows)
        if self._on_all:
            no_ids: Any = torch.empty((len(raw_ids), 0), dtype=torch.int64, device=scores.device)
            scores = self._on_all(no_ids, scores)
        return cast("Tensor", scores)

    def _draw(self, scores: Tensor) -> Tensor:
        """Sample [B] by inverting the cumulative distribution: one uniform number per row."""
        cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)  # [B, V]
        uniform = torch.cat(
            [torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators]
        ).to(scores.device)
        # right=True takes the first id whose cumulative value exceeds the draw: probability > 0.
        drawn = torch.searchsorted(
            cumulative, uniform[:, None] * cumulative[:, -1:], right=True
        ).clamp_max(scores.shape[-1] - 1)
        return drawn[:, 0]


def fresh_seed() -> int:
    """Draw a seed from torch's global generator, which ``torch.manual_seed`` sets."""
    return int(torch.randint(2**62, (1,)))


def _stream(seed: int, number: int, past: int) -> torch.Generator:
    key = (seed, number, past) if past else (seed, number)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


class Stopper:
    """Decide whether a row ends with the token just chosen.

    Stop strings, which need a tokenizer, are looked for in generated text only, and there in as
    many tokens at the end as the longest of them has characters (bytes). Each of the further
    ``criteria`` is called once per row and token with that row's raw ids [1, T], prompt included,
    and without scores.
    """

    def __init__(
        self,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        criteria: StoppingCriteriaList | None = None,
    ) -> None:
        assert config.max_new_tokens is not None  # noqa: S101  GenerateOptions.check
        self._max_new_tokens = config.max_new_tokens
        self._eos = frozenset(eos_ids(config.eos_token_id))
        self._strings = None
        if config.stop_strings:
            texts = tuple(stop_texts(config.stop_strings))
            if tokenizer is None:
                raise GenerationError("stop strings need a tokenizer", texts, "Use eos_token_id.")
            try:
                self._strings = _analysed(tokenizer, len(tokenizer), texts)
            except ValueError as error:  # its analysis encodes "abcdef" and looks for it
                rule = "stop strings need a tokenizer that can encode Latin letters"
                raise GenerationError(rule, str(error), "Use eos_token_id.") from error
        self._criteria = StoppingCriteriaList(criteria or [])
        if config.max_time is not None:
            rule, seconds = "max_time must be a number of seconds", config.max_time
            fits = isinstance(seconds, int | float) and not math.isnan(seconds)
            require(fits, GenerationError, rule, seconds, "Correct it.")
            self._criteria.append(MaxTimeCriteria(config.max_time))
        self._history = History()

    def reason(self, raw_ids: Sequence[int], generated: int, row: int = 0) -> StopReason | None:
        if raw_ids[-1] in self._eos:
            return "eos"
        if self._strings is not None:
            tail = raw_ids[-min(generated, self._strings.maximum_token_len) :]
            if bool(self._strings(cast("torch.LongTensor", torch.tensor([tail])), None)[0]):
                return "stop_string"
        if self._criteria and bool(self._criteria(self._history.row(row, raw_ids), None)[0]):
            return "criteria"
        return "length" if generated >= self._max_new_tokens else None


def eos_ids(eos: int | Sequence[int] | None) -> list[int]:
    """Return the ids of an ``eos_token_id`` setting, which may be one, several or none."""
    if eos is None:
        return []
    try:
        return [index(eos)] if isinstance(eos, int | np.integer) else [index(i) for i in eos]
    except (TypeError, ValueError) as error:
        rule, remedy = "eos_token_id must be one id or several", "Give whole numbers, or None."
        raise GenerationError(rule, eos, remedy) from error


def end_ids(backbone: Backbone) -> list[int]:
    """Return the ids that end a text: the model's own, else the tokenizer's."""
    eos = backbone.model.generation_config.eos_token_id
    if eos is None and backbone.tokenizer is not None:
        eos = backbone.tokenizer.eos_token_id
    return eos_ids(eos)


def stop_texts(option: object) -> list[str]:
    several = isinstance(option, Iterable) and not isinstance(option, str)
    texts: list[Any] = list(cast("Iterable[object]", option)) if several else [option]
    usable = all(isinstance(text, str) and text and not encoding_error(text) for text in texts)
    rule = "stop_strings must be texts of at least one character, without lone surrogates"
    require(usable, GenerationError, rule, texts, "Leave others out.")
    return texts


@lru_cache(maxsize=16)
def _analysed(
    tokenizer: PreTrainedTokenizerBase, _size: int, strings: tuple[str, ...]
) -> StopStringCriteria:
    """Analyse a vocabulary once: it takes a second at 100,000 ids. Added tokens change its size."""
    return StopStringCriteria(tokenizer, list(strings))
