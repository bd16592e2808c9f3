"""Generation tasks within lm-eval: configuration, figures, and cells that are not run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.evaluation.conftest import byte_tokenizer
from umim_core.evaluation import tasks
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lm_eval_tasks import NOT_RUN, GenerationTask, generation_config
from umim_core.task_sets.generation_spec import (
    GENERATION_TASKS,
    GenerationQuestion,
    GenerationSet,
    Wish,
)


def make(wish: Wish) -> Iterator[GenerationQuestion]:
    texts = ("the cat sat on the mat and the dog", "by the sea the old cat house near the log")
    for number, text in enumerate(texts):
        yield GenerationQuestion(str(number), {"text": text}, ("the cat",))


OWN = GenerationSet(
    name="umim_own",
    prompt="{text}",
    make=make,
    version=1,
    metrics=("recall", "rouge"),
    max_new_tokens=8,
    length=48,
    until=("\n",),
)
FIGURES = ("recall", "rouge1", "rouge2", "rougeL", "rougeLsum")


@pytest.fixture
def metadata(checkpoint_path: Path) -> dict[str, Any]:
    return {"checkpoint": str(checkpoint_path)}


@pytest.fixture(autouse=True)
def own_task() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        GENERATION_TASKS.names()
        patch.setitem(GENERATION_TASKS._found, OWN.name, OWN)
        yield


def run(model: Any, metadata: dict[str, Any], name: str = OWN.name) -> dict[str, Any]:
    config = {"task": name, "class": GenerationTask}
    manager = TaskManager(include_defaults=False, metadata=metadata)
    found = evaluate(lm=model, task_dict=manager.load([config]), bootstrap_iters=10)
    assert found is not None
    return dict(found)


def test_figures_are_means_with_standard_errors_and_samples_hold_reductions(
    metadata: dict[str, Any],
) -> None:
    model = UmimLM(metadata["checkpoint"], merge="all")
    found = run(model, metadata)
    result, samples = found["results"][OWN.name], found["samples"][OWN.name]
    for figure in (*FIGURES, "prompt_tr", "gen_kv_tr", "cumulative_kv_tr"):
        values = [sample[figure] for sample in samples]
        mean = sum(values) / 2
        assert result[f"{figure},none"] == pytest.approx(mean)
        # two values lie equally far from their mean: the standard error is that distance
        assert result[f"{figure}_stderr,none"] == pytest.approx(abs(values[0] - mean))
    assert result["prompt_tr,none"] > 0
    assert model.context_token_reduction is not None
    lengths = [sample["doc"]["prompt_tokens"] for sample in samples]
    saved = sum(s["prompt_tr"] * n for s, n in zip(samples, lengths, strict=True))
    assert saved / sum(lengths) == pytest.approx(model.context_token_reduction)


def test_hf_gives_the_same_figures_without_reductions(metadata: dict[str, Any]) -> None:
    model = UmimLM(metadata["checkpoint"], merge="none")
    theirs = HFLM(model.backbone.model, tokenizer=model.backbone.tokenizer, batch_size=1)
    expected, found = (run(one, metadata)["results"][OWN.name] for one in (theirs, model))
    assert found == expected
    assert f"{FIGURES[0]},none" in found
    assert "prompt_tr,none" not in found


def test_a_cell_beyond_the_context_asks_nothing_and_says_so(metadata: dict[str, Any]) -> None:
    class Mute(HFLM):  # type: ignore[misc]  # lm-eval ships no types
        def _model_generate(self, *_: object, **__: object) -> None:
            raise AssertionError("the model was asked")

    backbone = UmimLM(metadata["checkpoint"], merge="none").backbone
    mute = Mute(backbone.model, tokenizer=backbone.tokenizer, batch_size=1)
    found = run(mute, metadata | {"max_length": 47})
    result = found["results"][OWN.name]
    assert {result[f"{figure},none"] for figure in FIGURES} == {"not run: context"}
    assert result["recall_stderr,none"] == "N/A"
    assert found["configs"][OWN.name]["metadata"]["not_run"] == NOT_RUN
    with pytest.raises(AssertionError, match="was asked"):
        run(mute, metadata | {"max_length": 48})


def test_a_tokenizer_alone_measures_texts_for_a_model_of_unknown_context(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "words")
    own = {"tokenizer": str(tmp_path / "words"), "model": "a-service"}
    found = generation_config(OWN, own)["metadata"]
    assert found["context"] is None  # type: ignore[index]  # of a plain dict
    assert generation_config(OWN, metadata)["metadata"]["context"] == 48  # type: ignore[index]


@pytest.mark.full
@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_a_generated_task_runs_to_its_end_by_name(merge: str, tmp_path: Path) -> None:
    (folder,) = tasks.__path__
    metadata = {"checkpoint": "umim-docs-llama", "task_questions": 3, "task_new_tokens": 8}
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    names = ["umim_ruler", "umim_multidoc_2k"]
    found = evaluate(UmimLM("umim-docs-llama", merge=merge), manager.load(names), limit=2)
    assert found is not None
    results = found["results"]
    for name in ("umim_ruler_4k", "umim_ruler_8k", "umim_ruler_16k"):
        assert results[name]["recall,none"] == NOT_RUN
    for name, figure in (
        ("umim_ruler_1k", "recall"),
        ("umim_ruler_2k", "recall"),
        ("umim_multidoc_2k", "substring_match"),
    ):
        assert 0 <= results[name][f"{figure},none"] <= 1
        assert results[name]["prompt_tr,none"] > 0
        assert (results[name]["gen_kv_tr,none"] > 0) <= (merge == "all")
        assert len(found["samples"][name]) == 2
