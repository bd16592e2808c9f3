"""Tasks of the paper: data and prompts of lm-eval's own tasks, our metrics, every answer judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from umim_core.evaluation import tasks
from umim_core.evaluation.generated_rows import GeneratedText
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.lm_eval_tasks import (
    PaperTask,
    contest_answer,
    knows_task,
    load_tasks,
    own_config,
    run_task,
)
from umim_core.evaluation.text_metrics.bertscore import BERTSCORE
from umim_core.evaluation.text_metrics.text_metric import TEXT_METRICS
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS

PROBLEMS = [
    {"ID": "1", "Problem": "the cat sat", "Solution": "x", "Answer": 27},
    {"ID": "2", "Problem": "the dog", "Solution": "x", "Answer": 204},
]


@pytest.fixture
def hub(local_hub: Path) -> Path:
    """The hub with the data sets of these tests."""
    write_data_set(local_hub, "Maxwell-Jia/AIME_2024", "default", {"train": PROBLEMS})
    return local_hub


def test_a_contest_is_asked_as_in_the_paper_and_all_answers_are_judged(
    hub: Path, checkpoint_path: Path
) -> None:
    task = load_tasks(["umim_aime24"])["umim_aime24"]
    assert task.get_config("repeats") == 16
    kwargs = task.get_config("generation_kwargs")
    assert (kwargs["max_gen_toks"], kwargs["temperature"], kwargs["top_p"]) == (15_000, 0.6, 0.95)
    task.set_config("repeats", 2)
    task.set_config("generation_kwargs", kwargs | {"max_gen_toks": 4})
    found, samples = run_task(UmimLM(checkpoint_path, merge="prompt", raw_tail=0), task, None)
    assert [len(sample["resps"][0]) for sample in samples] == [2, 2]
    (prompt, _), *_ = samples[0]["arguments"]
    assert prompt.startswith("the cat sat\nLet's think step by step") and "\\boxed{}" in prompt
    assert found["pass@1,none"] == 0.0 and "prompt_tr,none" in found
    texts = [GeneratedText(text, {"prompt_tr": 0.5}) for text in ("so \\boxed{27}", "so 27")]
    judged = task.process_results(task.eval_docs[0], [texts])
    assert (judged["pass@1"], judged["prompt_tr"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"so it is \boxed{27}.", "27.0", True),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac12", True),
        ("it is $27$", "27", True),
        ("I do not know", "27", False),
    ],
)
def test_answers_of_contests(text: str, reference: str, right: bool) -> None:
    assert contest_answer([text], {"references": [reference]}) == {"pass@1": float(right)}


ROW = {"text": "the cat", "answers": ["the cat", "x"]}


def config(**changes: Any) -> dict[str, Any]:
    return {
        "task": "umim_own",
        "text_metrics": ["rouge", "bertscore"],
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list([ROW])}),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "answers",
        "metadata": {"version": 1.0},
    } | changes


def test_bertscore_is_a_figure_where_a_model_of_features_is_named(backbone_path: Path) -> None:
    plain = PaperTask(config())
    found = plain.process_results(ROW, [["the cat"]])
    assert found["rouge1"] == 1.0 and BERTSCORE not in {*found, *plain.aggregation()}
    named = {"version": 1.0, "task_features": str(backbone_path)}
    assert PaperTask(config(metadata=named)).process_results(ROW, [["the cat"]])[
        BERTSCORE
    ] == pytest.approx(1.0)


@pytest.fixture
def names() -> Iterator[set[str]]:
    (folder,) = tasks.__path__
    yield {path.stem for path in Path(folder).glob("*.yaml")}


def test_every_task_has_a_file_for_lm_evals_command(names: set[str]) -> None:
    assert {*TASKS.names(), *GENERATION_TASKS.names()} <= names
    (folder,) = tasks.__path__
    index = TaskManager(include_path=folder, include_defaults=False).task_index
    for name in names:
        made = own_config(name)
        assert made is not None and made["task"] == name and knows_task(name)
        assert name in index
    for name in GENERATION_TASKS.names():
        assert {TEXT_METRICS.find(metric) for metric in GENERATION_TASKS.find(name).metrics}
        assert "GenerationTask" in (index[name].cfg or {})["class"]
    assert own_config("umim_gsm8k") is None and own_config("../umim_piqa") is None
