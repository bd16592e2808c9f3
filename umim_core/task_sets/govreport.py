"""A stand-in for GovReport on machines without it: summarise the report of a government agency.

Reports are invented; their summary is the first sentence of every section.

Source: Huang et al., 2021; prompt and length of answers are LongBench's (Bai et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from umim_core.task_sets.generation_spec import GenerationSet, Wish, add_generation_task
from umim_core.task_sets.prompt_filling import NOUNS, sentences

SECTIONS: Final = 6
_PROMPT: Final = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{report}\n\n"
    "Now, write a one-page summary of the report.\n\nSummary:"
)
_FINDINGS: Final = (
    "In {year} the {office} spent {money} million dollars on its {noun} programme, {percent} "
    "percent more than planned.",
    "The {office} inspected {money} of its {noun} sites in {year} and closed {percent} of them.",
    "By {year} only {percent} percent of the {noun} projects of the {office} had been finished.",
    "The {office} has followed {percent} of the {money} recommendations of {year} about its {noun} "
    "grants.",
)
_OFFICES: Final = (
    "Harbor Office",
    "Forest Service",
    "Bridge Agency",
    "Grain Board",
    "Water Authority",
)


def report(wish: Wish, number: int) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return a report with the summary that its sections begin with."""
    rng = wish.generator(number)
    office = rng.choice(_OFFICES)
    findings = [
        rng.choice(_FINDINGS).format(
            office=office,
            noun=rng.choice(NOUNS),
            year=rng.randrange(1990, 2024),
            money=rng.randrange(100, 1000),
            percent=rng.randrange(2, 100),
        )
        for _ in range(SECTIONS)
    ]
    return wish.filled(sentences(rng), partial(_fields, findings)), [" ".join(findings)]


def _fields(findings: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Deal sentences out to the sections, each behind its finding."""
    share = [taken[place :: len(findings)] for place in range(len(findings))]
    sections = [" ".join((finding, *rest)) for finding, rest in zip(findings, share, strict=True)]
    return {"report": "\n\n".join(sections)}


add_generation_task(
    GenerationSet(
        name="umim_govreport_generated",
        prompt=_PROMPT,
        make=report,
        version=1,
        metrics=("rouge",),
        max_new_tokens=512,
        length=4096,
    )
)
