"""One contract of generation: without rules every ``merge`` gives what lm-eval's ``hf`` gives.

lm-eval's own classes over tiny models in memory; the oracle is ``HFLM``. The quick set covers every
pair of case, way of merging and batch size, the full set all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance

from support.generation_contract import BATCHES, MERGES, Case, Models, free_ids, span
from tests.evaluation.conftest import TEXT
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

CASES = {
    "greedy": Case(),
    "several end tokens": Case(ends=((0, 3), (1, 5), (2, 2))),
    "stop strings in the text": Case(stops=((0, 2, 4), (1, 6, 8), (2, 0, 1))),
    "stop strings across the border": Case(stops=((0, -1, 1), (1, -1, 1), (2, -1, 1), (3, -1, 1))),
    "settings of the model": Case({"repetition_penalty": 1.8, "suppress_tokens": [5, 280]}),
    "settings of the task": Case(options={"repetition_penalty": 1.5, "min_new_tokens": 4}),
    "task over model": Case({"repetition_penalty": 3.0}, {"repetition_penalty": 1.1}),
    "prompts beyond the context": Case(prompts=(TEXT * 3, TEXT, "the cat")),
    "a BOS by default": Case(bos=True),
    "kwargs without effect": Case(options={"early_stopping": True, "length_penalty": 2.0}),
    "a length with the prompt": Case(options={"max_length": 20}, batch_of_hf=1),
    "sampling left to the model": Case({"do_sample": True, "temperature": 0.3, "top_p": 0.5}),
}


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], tuple[Models, list[Instance]]]]:
    """Models and requests of a case by its name, end tokens and stop strings chosen; made once."""
    known: dict[str, tuple[Models, list[Instance]]] = {}

    def make(name: str) -> tuple[Models, list[Instance]]:
        if name not in known:
            models = Models(CASES[name])
            free = [free_ids(models, prompt) for prompt in models.case.prompts]
            ends = [free[k][1][place] for k, place in models.case.ends]
            if ends:
                models.backbone.model.generation_config.eos_token_id = [0, *ends]
            until = [span(models, *free[k], a, b) for k, a, b in models.case.stops]
            known[name] = models, models.requests(until=until)
        return known[name]

    return make


def pairs() -> list[object]:
    """All combinations of case, merge and batch size; half of them hold every pair."""
    return [
        pytest.param(name, merge, batch, marks=[] if (c + m + b) % 2 == 0 else [pytest.mark.full])
        for c, name in enumerate(CASES)
        for m, merge in enumerate(MERGES)
        for b, batch in enumerate(BATCHES)
    ]


@pytest.mark.parametrize(("name", "merge", "batch_size"), pairs())
def test_without_rules_texts_are_those_of_hf(
    made: Callable[[str], tuple[Models, list[Instance]]], name: str, merge: str, batch_size: int
) -> None:
    models, requests = made(name)
    theirs = models.hf(models.case.batch_of_hf or batch_size).generate_until(requests)
    size = 1 if merge == "none" and models.case.batch_of_hf else batch_size
    assert models.ours(merge, size).generate_until(requests) == theirs
    assert len(set(theirs)) > 1


@pytest.mark.parametrize("merge", ["prompt", "all"])
@pytest.mark.parametrize("batch_size", BATCHES)
def test_with_rules_the_raw_text_alone_decides_stops(merge: str, batch_size: int) -> None:
    models = Models(Case())
    rows = [free_ids(models, prompt) for prompt in models.case.prompts]
    spans = [tuple(ids[k : k + 2]) for row in rows for ids in row for k in range(len(ids) - 1)]
    rules = RuleSet.from_spans([span for span in spans if 0 not in span])
    models.checkpoint = Checkpoint.of(
        MergedModel(models.backbone, models.checkpoint.module, Matcher(rules), "compact")
    ).recommending("all")  # without a raw tail
    free = models.ours(merge, 1).generate_until(models.requests())
    model = models.ours(merge, batch_size)
    for whole in free:
        stop = whole[3:5]
        cut = model.generate_until(models.requests(until=[stop]))
        assert cut == [text.split(stop)[0] for text in free]
        assert cut != free
    assert model.token_reduction > 0
