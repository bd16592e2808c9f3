"""compare=base: both models, paired differences with their errors, sizes of questions."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM, CachingLM

from support.ngram_oracle import read_spans, units_of
from tests.evaluation.conftest import task_config
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.standard_errors import ratio_error
from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks

WORDS = ["cat", "dog", "sea", "log", "old house", "mat", "the cat", "near"]
Build = Callable[..., UmimLM]


ROWS = [
    {"text": f"the {word} sat on the mat and the", "choices": [" cat sat", f" {word}"]}
    for word in WORDS
]


def config(name: str, kind: str, metrics: list[str], **options: object) -> dict[str, Any]:
    listed = [{"metric": metric} for metric in metrics]
    return task_config(kind, ROWS, name, target_delimiter="", metric_list=listed, **options)


TEXT = {"doc_to_text": "{{text}}"}
SHORT = {"until": ["."], "max_gen_toks": 3, "do_sample": False}
CHOICES = config(
    "choices", "multiple_choice", ["acc", "acc_norm"],
    **TEXT, doc_to_choice="choices", doc_to_target=1,
)  # fmt: skip
ROLLING = config(
    "rolling", "loglikelihood_rolling", ["word_perplexity", "bits_per_byte"],
    doc_to_text="", doc_to_target="{{text}}",
)  # fmt: skip
GREEDY = config(
    "greedy", "generate_until", ["exact_match"],
    **TEXT, doc_to_target="{{choices[1]}}", generation_kwargs=SHORT,
)  # fmt: skip
TASKS = [CHOICES, ROLLING, GREEDY]


@pytest.fixture(scope="module")
def build(checkpoint_path: Path) -> Build:
    return lambda merge="all", **options: UmimLM(
        str(checkpoint_path), merge, device="cpu", batch_size=4, **options
    )


def evaluate(model: LM, tasks: list[dict[str, Any]] = TASKS, **options: Any) -> dict[str, Any]:
    loaded = {"tasks": load_tasks(tasks), "groups": {}, "group_map": {}}
    found = evaluator.evaluate(lm=model, task_dict=loaded, bootstrap_iters=0, **options)
    return json.loads(json.dumps(found, default=str))


@pytest.fixture(scope="module")
def compared(build: Build) -> dict[str, Any]:
    return evaluate(build(compare="base"))


@pytest.fixture(scope="module")
def alone(build: Build) -> dict[str, dict[str, Any]]:
    return {merge: evaluate(build(merge)) for merge in ("all", "none")}


def test_both_models_have_the_metrics_of_calls_of_their_own(
    compared: dict[str, Any], alone: dict[str, dict[str, Any]]
) -> None:
    def figures(found: dict[str, Any], task: str) -> dict[str, Any]:
        return {key.partition(",")[0]: value for key, value in found["results"][task].items()}

    names = ("choices/acc", "choices/acc_norm", "rolling/word_perplexity", "greedy/exact_match")
    for task, metric in (name.split("/") for name in names):
        found, own, base = (figures(each, task) for each in (compared, *alone.values()))
        assert found[metric] == own[metric]
        assert found[f"{metric}_base"] == pytest.approx(base[metric], rel=1e-6)
        assert found[f"{metric}_difference"] == own[metric] - found[f"{metric}_base"]


def test_the_error_of_a_difference_is_that_of_the_differences_by_question(
    compared: dict[str, Any],
) -> None:
    samples = compared["samples"]["choices"]
    assert {"filtered_resps", "acc", "acc_norm"} <= set(samples[0]["base"])
    steps = [sample["acc_norm"] - sample["base"]["acc_norm"] for sample in samples]
    assert len(set(steps)) > 1
    expected = np.std(steps, ddof=1) / math.sqrt(len(WORDS))
    row = compared["results"]["choices"]
    assert row["acc_norm_difference_stderr,none"] == pytest.approx(expected)
    assert row["acc_norm_difference,none"] == pytest.approx(np.mean(steps))
    # of perplexities, too: texts of about the same bytes
    sums = [
        (s["bits_per_byte"], s["base"]["bits_per_byte"]) for s in compared["samples"]["rolling"]
    ]
    steps = [(ours[0] - base[0]) / ours[1] for ours, base in sums]
    error = compared["results"]["rolling"]["bits_per_byte_difference_stderr,none"]
    rough = np.std(steps) / math.sqrt(len(steps)) / math.log(2)
    assert error == pytest.approx(rough, rel=0.3)


def test_other_models_pass_through_unchanged(build: Build, alone: dict[str, Any]) -> None:
    base = alone["none"]
    names = {key.partition(",")[0] for row in base["results"].values() for key in row}
    assert not [name for name in names if name.endswith(("_base", "_difference", "reduction"))]
    assert "base" not in base["samples"]["choices"][0]
    assert "samples" not in evaluate(build("prompt"), [CHOICES], log_samples=False)


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_sizes_of_questions_equal_an_independent_count(
    build: Build, checkpoint_path: Path, merge: str
) -> None:
    model, spans = build(merge), read_spans(checkpoint_path / "rules")
    found = evaluate(model, [CHOICES])
    total = [0, 0]
    for sample in found["samples"]["choices"]:
        size, counted = model.question_sizes("choices")[sample["doc_id"]], [0, 0, 0, 0]
        for context, ending in sample["arguments"]:
            ids, new = model._encode_pair(context, ending)
            units = len(units_of(ids, spans))
            whole = units + len(new) if merge == "prompt" else len(units_of([*ids, *new], spans))
            alone = [len(ids), units] if merge == "prompt" else [0, 0]
            counted = np.add(counted, [len(ids) + len(new), whole, *alone]).tolist()
        assert [size.tokens, size.units, size.context_tokens, size.context_units] == counted
        total = np.add(total, counted[:2]).tolist()
    reduction = 1 - total[1] / total[0]
    info = model.get_model_info()["umim"]
    assert info["token_reduction"] == pytest.approx(reduction)
    assert info["tasks"]["choices"]["token_reduction"] == pytest.approx(reduction)
    assert (info["tasks"]["choices"]["context_token_reduction"] is None) == (merge == "all")
    assert reduction > 0
    model.forget_sizes()
    assert model.get_model_info()["umim"] == info | {"tasks": {}}


def test_lm_evals_cache_is_refused_where_something_merges(build: Build, tmp_path: Path) -> None:
    for merge, options in (("prompt", {}), ("all", {}), ("prompt", {"compare": "base"})):
        with pytest.raises(ConfigError, match=r"lm-eval's cache \(--use_cache\) keeps answers"):
            CachingLM(build(merge, **options), str(tmp_path / "cache.db"))
    cached = CachingLM(build("none"), str(tmp_path / "cache.db"))
    first, again = evaluate(cached), evaluate(cached)
    cached.dbdict.close()
    assert first["results"] == again["results"]


def test_every_form_of_a_call_is_compared(build: Build, compared: dict[str, Any]) -> None:
    """By position, and with tasks as older releases take them."""
    model, (loaded, again) = build(compare="base"), (load_tasks([CHOICES]) for _ in range(2))
    tasks = {"tasks": loaded, "groups": {}, "group_map": {}}
    for found in (
        evaluator.evaluate(model, tasks, bootstrap_iters=0),
        evaluator.evaluate(lm=model, task_dict=again, bootstrap_iters=0),
    ):
        assert found["results"]["choices"] == compared["results"]["choices"]
    before = inspect.unwrap(evaluator.evaluate)  # as who imported it before the first model has it
    with pytest.raises(EvaluationError, match="compare=base needs lm-eval's evaluate as it is onc"):
        before(lm=model, task_dict=tasks, bootstrap_iters=0)


def test_the_error_is_the_spread_of_the_mean_over_draws_of_rows() -> None:
    means = np.array([1.0, 2.0, 4.0, 5.0])
    assert ratio_error(8 * means, [8] * 4) == pytest.approx(means.std(ddof=1) / 2)
    for counts in ([], [5], [5, 0]):  # a single row has none
        assert ratio_error([float(count) for count in counts], counts) is None
    rng = np.random.default_rng(0)
    drawn = rng.integers(5, 50, (2000, 40))
    sums = drawn * rng.normal(3.0, 1.0, drawn.shape)  # a row's tokens share its level
    spread = (sums.sum(axis=1) / drawn.sum(axis=1)).std()
    errors = [ratio_error(s, c) for s, c in zip(sums[:200], drawn[:200], strict=True)]
    assert np.mean(errors) == pytest.approx(spread, rel=0.06)
