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
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
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

from umim_core.errors import GenerationError, NumericalError
from umim_core.merging.stopping import eos_ids

# Settings, in transformers' own order: the values without effect and what makes the processor.
# The first table's need a row's ids, the second's do not; the third's count when sampling only.
_Factory = Callable[[Any], LogitsProcessor]
_Table = dict[str, tuple[tuple[object, ...], _Factory]]
_ON_IDS: Final[_Table] = {
    "sequence_bias": ((None,), SequenceBiasLogitsProcessor),
    "repetition_penalty": ((None, 1.0), RepetitionPenaltyLogitsProcessor),
    "no_repeat_ngram_size": ((None, 0), NoRepeatNGramLogitsProcessor),
}
_PLAIN: Final[_Table] = {
    "suppress_tokens": ((None,), SuppressTokensLogitsProcessor),
}
_WARPERS: Final[_Table] = {
    "temperature": ((None, 1.0), TemperatureLogitsWarper),
    "top_k": ((None, 0), TopKLogitsWarper),
    "top_p": ((None, 1.0), TopPLogitsWarper),
    "min_p": ((None,), MinPLogitsWarper),
    "typical_p": ((None, 1.0), TypicalLogitsWarper),
    "epsilon_cutoff": ((None, 0.0), EpsilonLogitsWarper),
    "eta_cutoff": ((None, 0.0), EtaLogitsWarper),
}
_HONOURED: Final = frozenset(
    {
        *_ON_IDS,
        *_PLAIN,
        *_WARPERS,
        "bad_words_ids",
        "do_sample",
        "eos_token_id",
        "max_new_tokens",
        "max_time",
        "min_new_tokens",
        "num_return_sequences",
        "stop_strings",
    }
)
# Settings that say how transformers runs or reports, and that change no token.
_WITHOUT_EFFECT: Final = frozenset(
    {"bos_token_id", "pad_token_id", "use_cache", "transformers_version", "return_dict_in_generate"}
)
_NEUTRAL: Final = {"num_beams": 1}


def check_generation_config(config: GenerationConfig) -> None:
    """Refuse what the engine would otherwise ignore.

    Args:
        config: The generation settings.

    Raises:
        GenerationError: If ``max_new_tokens`` is not positive, a setting is not supported, or
            several samples are asked for without sampling.
    """
    new = config.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, int) or new < 1:
        raise GenerationError(
            "max_new_tokens must be an integer of at least 1", new, "Ask for one token or more."
        )
    unknown = sorted(
        name
        for name, value in config.to_diff_dict().items()
        if value is not None
        and name not in _HONOURED | _WITHOUT_EFFECT
        and not name.startswith("_")
        and _NEUTRAL.get(name) != value
    )
    if unknown:
        raise GenerationError(
            f"generation settings must be among {sorted(_HONOURED)}",
            {name: config.to_dict()[name] for name in unknown},
            "Leave the others out; beam search is not supported.",
        )
    samples = samples_per_prompt(config)
    if samples < 1 or (samples > 1 and not config.do_sample):
        raise GenerationError(
            "num_return_sequences must be 1, or more with do_sample",
            samples,
            "Sample, or ask for one.",
        )


def samples_per_prompt(config: GenerationConfig) -> int:
    """Return how many rows each prompt gets."""
    return 1 if config.num_return_sequences is None else int(config.num_return_sequences)


def _processed(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
    """Apply processors to scores [B, V]; transformers' signatures say Long- and FloatTensor."""
    return processors(cast("torch.LongTensor", ids), cast("torch.FloatTensor", scores))


def _from_table(table: _Table, config: GenerationConfig) -> list[LogitsProcessor]:
    values = ((getattr(config, name), *entry) for name, entry in table.items())
    return [factory(value) for value, neutral, factory in values if value not in neutral]


class TokenChooser:
    """Choose one token per row from its logits.

    Each row samples from a stream of its own, made from (seed, row): what a row draws does not
    depend on the rows beside it or on when they finish.

    Args:
        config: What ``check_generation_config`` lets pass.
        prompt_lengths: Raw prompt tokens per row, which ``min_new_tokens`` counts from.
        seed: Not negative; equal seeds give equal draws.
        processors: Further processors, applied behind those of ``config`` and before the warpers,
            as in transformers. Each is called once per row with that row's raw ids [1, T].
        past_lengths: Raw tokens per row of earlier turns, so that a turn draws numbers of its own;
            zeros if None.
        device: Where the logits will be.

    Raises:
        GenerationError: If transformers refuses a setting (a temperature of 0, say), or the seed
            is negative.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt_lengths: Sequence[int],
        seed: int,
        processors: LogitsProcessorList | None = None,
        *,
        past_lengths: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if seed < 0:
            raise GenerationError("a seed must not be negative", seed, "Use 0 or a larger integer.")
        self._sample = bool(config.do_sample)
        try:
            on_ids = _from_table(_ON_IDS, config)
            if config.bad_words_ids is not None:
                on_ids.append(
                    NoBadWordsLogitsProcessor(config.bad_words_ids, eos_ids(config.eos_token_id))
                )
            least = [_least_length(config, length, str(device)) for length in prompt_lengths]
            plain = _from_table(_PLAIN, config)
            warpers = _from_table(_WARPERS, config) if self._sample else []
        except ValueError as error:
            raise GenerationError("a sampling setting is out of range", str(error)) from error
        behind = [*plain, *(processors or ())]
        alike = not processors and not on_ids and not any(least)
        # Rows have their own ids and lengths, and padding would be penalised: one call a row.
        self._per_row = (
            [] if alike else [LogitsProcessorList([*on_ids, *own, *behind]) for own in least]
        )
        self._on_all = LogitsProcessorList([*(plain if alike else ()), *warpers])
        self._generators = [
            torch.Generator().manual_seed(
                int(
                    np.random.SeedSequence((seed, b, past) if past else (seed, b)).generate_state(
                        1
                    )[0]
                )
            )
            for b, past in enumerate(past_lengths or [0] * len(prompt_lengths))
        ]

    def choose(
        self,
        logits: Tensor,
        raw_ids: Sequence[Sequence[int]],
        running: Sequence[bool] | None = None,
    ) -> list[int]:
        """Choose the next token of every row.

        Args:
            logits: Next-token logits [B, V].
            raw_ids: Prompt and generated raw ids per row, of any length.
            running: Rows whose choice counts; all if None.

        Returns:
            One id per row.

        Raises:
            GenerationError: If a processor refuses its input.
            NumericalError: If nothing can be chosen for a running row: logits that are not numbers,
                or every id ruled out.
        """
        # transformers.generate scores in float32; float64 models keep their own precision.
        scores = logits if logits.dtype == torch.float64 else logits.float()
        try:
            scores = self._processed(scores, raw_ids)
        except ValueError as error:  # some of transformers' check their settings here
            raise GenerationError("a logits processor refused its input", str(error)) from error
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
            rows = [torch.tensor([ids], device=scores.device) for ids in raw_ids]
            scores = torch.cat(
                [
                    _processed(own, ids, scores[b : b + 1])
                    for b, (own, ids) in enumerate(zip(self._per_row, rows, strict=True))
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


def _least_length(
    config: GenerationConfig, prompt_length: int, device: str
) -> list[LogitsProcessor]:
    """Return what holds back the end of a row until ``min_new_tokens``."""
    ends = eos_ids(config.eos_token_id)
    if not config.min_new_tokens or not ends:
        return []
    return [
        MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, ends, device=device)
    ]
