"""Texts generated after compressed prompts, cut to their limits, with their tokens and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from umim_core.evaluation.gen_kwargs import Wanted
from umim_core.evaluation.scored_requests import Ints, Sizes, count_sizes
from umim_core.evaluation.scoring import Scorer
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import RowOutput
from umim_core.inference.request import Request


@dataclass(frozen=True)
class GeneratedRow:
    """A generated text.

    Attributes:
        output: The engine's own account of the row.
        ids: Generated raw ids, at most as many as were wanted.
        sizes: Raw tokens and units of prompt and text.
    """

    output: RowOutput
    ids: tuple[int, ...]
    sizes: Sizes


def generate_rows(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Ints],
    wanted: Wanted,
    request: Request,
) -> list[GeneratedRow]:
    """Generate a text after each prompt, in one batch.

    Args:
        engine: Engine of the scorer's model.
        scorer: Cuts prompts that leave no room, and counts.
        prompts: Raw ids per prompt [T_b].
        wanted: Settings of the texts.
        request: The engine's own options.

    Raises:
        GenerationError: If a prompt or the settings leave no room for a text.
        EvaluationError: If a single unit of a prompt has no room.
    """
    room = wanted.room(scorer.max_units)
    rows = [scorer.fit(ids, room)[0] for ids in prompts]
    limits = wanted.limits([len(ids) for ids in rows])
    output = engine.generate(rows, wanted.settings(max(limits)), request)
    found = []
    for row, limit in zip(output.rows, limits, strict=True):
        units, new = row.cache_lengths[0], len(row.ids)
        saved = sum(length - 1 for _, length in row.generated_spans)
        sizes = Sizes(row.prompt_length + new, units + new - saved, row.prompt_length, units)
        count_sizes(sizes, scorer.inputs, scorer.contexts)
        found.append(GeneratedRow(row, row.ids[:limit], sizes))
    return found
