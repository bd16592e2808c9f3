"""Token choice on raw ids, with transformers' own processors.

Merging never shows here: processors get the prompt's and the generated raw ids, so a repetition
penalty means what it means in ``transformers.generate``.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from umim_core.backbone.devices import float64_device
from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.stopping import History, eos_ids

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


def _processed(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
    return processors(cast("torch.LongTensor", ids), cast("torch.FloatTensor", scores))


def _from_table(table: _Table, config: GenerationConfig) -> list[LogitsProcessor]:
    processors = []
    for name, (neutral, factory) in table.items():
        value = getattr(config, name)
        if value in neutral:
            continue
        try:
            if isinstance(value, float) and math.isnan(value):  # lies within all bounds
                raise ValueError("it must be a number")
            processors.append(factory(value))
        except (TypeError, ValueError) as error:
            raise GenerationError(
                f"the sampling setting {name} is out of range: {str(error).rstrip('.')}",
                repr(value),
                "Correct it, or leave it out.",
            ) from error
    return processors


class TokenChooser:
    """Choose one token per row from its logits.

    Each row samples from a stream of its own, made from the seed and the stream's number: what a
    row draws does not depend on the other rows or on when they finish.

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
        self._sample = bool(config.do_sample)
        try:
            on_ids = _from_table(ON_IDS, config)
            if config.bad_words_ids is not None:
                on_ids.append(
                    NoBadWordsLogitsProcessor(config.bad_words_ids, eos_ids(config.eos_token_id))
                )
            least = [_least_length(config, length, str(device)) for length in prompt_lengths]
            plain = _from_table(PLAIN, config)
            warpers = _from_table(WARPERS, config) if self._sample else []
        except (TypeError, ValueError) as error:
            raise GenerationError(
                "a sampling setting is out of range",
                str(error).rstrip("."),
                "Correct it, or leave it out.",
            ) from error
        behind = [*plain, *(processors or ())]
        self._foreign = bool(processors)
        uniform = not processors and not on_ids and not any(least)
        # Rows have their own ids and lengths, and padding would be penalised: one call a row.
        self._per_row = (
            [] if uniform else [LogitsProcessorList([*on_ids, *own, *behind]) for own in least]
        )
        self._on_all = LogitsProcessorList([*(plain if uniform else ()), *warpers])
        self._history = History(device)
        if self._sample:
            key, pasts = fresh_seed() if seed is None else seed, past_lengths or [0] * len(least)
            numbers = range(len(least)) if streams is None else streams
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
        scores = _wide(logits)
        if self._foreign:  # one of them may write into its scores; the logits are still to report
            scores = scores.clone()
        try:
            scores = self._processed(scores, raw_ids)
        except ValueError as error:  # some of transformers' check their settings here
            raise GenerationError(
                "a logits processor refused its input", str(error), "Correct its settings."
            ) from error
        scores = scores.to(float64_device(scores.device))
        best = scores.max(dim=-1)
        chosen = self._draw(scores) if self._sample else best.indices
        # One read for both: it waits for the device. Ids are exact in float64.
        highest, tokens = torch.stack([best.values.double(), chosen.double()]).tolist()
        for b, value in enumerate(highest):
            # A processor may force a token by infinity; its probability would be no number.
            fails = math.isnan(value) or value == -math.inf or (self._sample and value == math.inf)
            if fails and (running is None or running[b]):
                raise NumericalError(
                    "every row must have a token with a finite score",
                    f"row {b}: highest score {value}",
                    "Allow more tokens, or look for NaN in the backbone's weights.",
                )
        return [int(token) for token in tokens]

    def _processed(self, scores: Tensor, raw_ids: Sequence[Sequence[int]]) -> Tensor:
        """Apply all processors to scores [B, V]."""
        if self._per_row:
            scores = torch.cat(
                [
                    _processed(own, self._history.row(b, ids), scores[b : b + 1])
                    for b, (own, ids) in enumerate(zip(self._per_row, raw_ids, strict=True))
                ]
            )
        if self._on_all:
            no_ids = torch.empty((len(raw_ids), 0), dtype=torch.int64, device=scores.device)
            scores = _processed(self._on_all, no_ids, scores)
        return scores

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


def log_probs(logits: Tensor, tokens: NDArray[np.int64]) -> tuple[Tensor, list[float]]:
    """Return the model's own log-probabilities of all ids [B, V], and of those chosen [B].

    Logits [B, V] are those before any processor.
    """
    scores = _wide(logits).log_softmax(dim=-1)
    ids = torch.from_numpy(tokens).to(scores.device)
    return scores, scores.gather(1, ids[:, None])[:, 0].tolist()


def fresh_seed() -> int:
    """Draw a seed from torch's global generator, which ``torch.manual_seed`` sets."""
    return int(torch.randint(2**62, (1,)))


def _wide(logits: Tensor) -> Tensor:
    """Return float32 logits, as transformers.generate scores; float64 keeps its precision."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _stream(seed: int, number: int, past: int) -> torch.Generator:
    key = (seed, number, past) if past else (seed, number)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def _least_length(
    config: GenerationConfig, prompt_length: int, device: str
) -> list[LogitsProcessor]:
    """Return what holds back the end of a row until it is long enough."""
    ends, new = eos_ids(config.eos_token_id), config.min_new_tokens
    least: list[LogitsProcessor] = []
    if config.min_length and ends:  # the prompt counts
        least.append(MinLengthLogitsProcessor(config.min_length, ends, device=device))
    if new and ends:
        least.append(MinNewTokensLengthLogitsProcessor(prompt_length, new, ends, device=device))
    return least
