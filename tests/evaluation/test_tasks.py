"""Tasks within lm-eval: the paper's, generated ones, programs; their questions scored in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from support.tiny_table import write_questions
from tasks.stages.adaptation import compared
from tests.evaluation.conftest import byte_tokenizer, likelihoods, task_config
from umim_core.config.form import Merge
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import EvaluationError
from umim_core.evaluation import tasks
from umim_core.evaluation.generated_rows import GeneratedText
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.questions import (
    QuestionScores,
    choice_values,
    described,
    evaluate_task,
    score_choices,
    score_range,
    shard_seed,
)
from umim_core.evaluation.sizes import Sizes
from umim_core.evaluation.tasks.lm_eval_tasks import (
    NOT_RUN,
    GenerationTask,
    PaperTask,
    SequenceTask,
    generation_config,
    knows_task,
    load_tasks,
    own_config,
    run_task,
)
from umim_core.evaluation.text_metrics import BERTSCORE, code_tests, contest_answer, find_metrics
from umim_core.model.umim import UMIM
from umim_core.store.disk import write_rows
from umim_core.task_sets.generation_spec import GENERATION_TASKS, GenerationSet, Wish
from umim_core.task_sets.spec import TASKS, read_questions

PROBLEMS = [
    {"ID": "1", "Problem": "the cat sat", "Solution": "x", "Answer": 27},
    {"ID": "2", "Problem": "the dog", "Solution": "x", "Answer": 204},
]


@pytest.fixture
def hub(local_hub: Path) -> Path:
    """The hub with the data sets of these tests."""
    splits = ("train", "validation")
    write_data_set(local_hub, "Maxwell-Jia/AIME_2024", "default", {"train": PROBLEMS})
    write_data_set(local_hub, "aps/super_glue", "copa", dict.fromkeys(splits, COPA))
    write_data_set(local_hub, "baber/piqa", "default", dict.fromkeys(splits, PIQA))
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


def test_bertscore_is_a_figure_where_a_model_of_features_is_named(backbone_path: Path) -> None:
    row = {"text": "the cat", "answers": ["the cat", "x"]}
    own = {
        "text_metrics": ["rouge", "bertscore"],
        "doc_to_text": "text",
        "doc_to_target": "answers",
    }

    def task(**features: str) -> PaperTask:
        metadata = {"version": 1.0, **features}
        return PaperTask(task_config("generate_until", [row], **own, metadata=metadata))

    found = task().process_results(row, [["the cat"]])
    assert found["rouge1"] == 1.0 and BERTSCORE not in {*found, *task().aggregation()}
    judged = task(task_features=str(backbone_path)).process_results(row, [["the cat"]])
    assert judged[BERTSCORE] == pytest.approx(1.0)


def test_every_task_has_a_file_for_lm_evals_command() -> None:
    (folder,) = tasks.__path__
    names = {path.stem for path in Path(folder).glob("*.yaml")}
    assert {*TASKS.names(), *GENERATION_TASKS.names()} <= names
    index = TaskManager(include_path=folder, include_defaults=False).task_index
    assert "umim_ruler" in index  # a tag
    for name in names:
        made = own_config(name)
        assert made is not None and made["task"] == name and knows_task(name)
        assert name in index
    for name in GENERATION_TASKS.names():
        assert find_metrics(GENERATION_TASKS.find(name).metrics)
        assert "GenerationTask" in (index[name].cfg or {})["class"]
    assert own_config("umim_gsm8k") is None and own_config("../umim_piqa") is None


CHOICES = ["sat on the mat", "near the old cat house by the sea"]
ROWS: list[dict[str, object]] = [
    {"text": f"the {word}", "choices": CHOICES, "gold": gold}
    for word, gold in (("cat", 0), ("dog and the old log", 1), ("sea", 1), ("mat", 0))
]
BEGUN = [{**ROWS[0], "text": "<|endoftext|>the cat"}]  # as a chat template may write it


@pytest.mark.parametrize(("merge", "rows"), [(None, ROWS), ("all", BEGUN)])
def test_one_forward_over_the_sequence_gives_the_scores(
    merge: str | None, rows: list[dict[str, object]], backbone_path: Path, checkpoint_path: Path
) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "batch_size": 2}
    if merge is None:
        model = HFLM(pretrained=str(backbone_path), add_bos_token=True, **settings)
    else:
        model = UmimLM(str(checkpoint_path), merge, **settings)
    own = {"doc_to_text": "text", "doc_to_choice": "choices", "doc_to_target": "gold"}
    config = task_config("multiple_choice", rows, **{"class": SequenceTask}, **own)
    (task,) = load_tasks([config]).values()
    assert isinstance(task, SequenceTask)
    task.tokenizer = model.tokenizer
    found, samples = run_task(model, task)
    hits = []
    for sample in samples:
        *answers, (prompt, _, tokens) = sample["filtered_resps"]
        texts = [context + answer for context, answer in sample["arguments"][:-1]]
        whole = model.loglikelihood(likelihoods(("", text) for text in texts), disable_tqdm=True)
        sums = [score for score, _ in whole]
        assert [prompt + score for score, _, _ in answers] == pytest.approx(sums, abs=1e-4)
        counts = [
            len(model.tok_encode(text, add_special_tokens=False)) - (rows is BEGUN)
            for text in texts
        ]
        assert [tokens + length for _, _, length in answers] == counts
        means = [score / count for score, count in zip(sums, counts, strict=True)]
        hits.append(means.index(max(means)) == sample["target"])
    assert found["acc_seq,none"] == sum(hits) / len(hits)
    assert {"acc,none", "acc_norm,none"} <= found.keys()
    assert merge is None or model.realised["token_reduction"] > 0.05


COPA = [
    {"premise": f"The {word} was here.", "choice1": f"A{first}", "choice2": f"I{second}",
     "question": "effect", "label": gold}
    for (word, gold), (first, second) in zip(
        (("cat", 0), ("dog", 1)), ((" sat on it.", " went."), (" log.", " sat near.")), strict=True
    )
]  # fmt: skip
PIQA = [{"goal": "see the cat", "sol1": "sit on the log", "sol2": "by the sea", "label": 1}]


@pytest.mark.parametrize("model", ["hf", "umim"])
def test_a_task_asks_what_lm_evals_own_asks_and_the_prompt_alone(
    model: str, checkpoint_path: Path, backbone_path: Path, hub: Path
) -> None:
    named = {"pretrained": backbone_path} if model == "hf" else {"checkpoint": checkpoint_path}
    options = {name: str(path) for name, path in named.items()}
    (folder,) = tasks.__path__
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=options)
    (place,) = lm_eval.tasks.__path__
    requests = []
    for name in (f"{place}/piqa/piqa.yaml", "umim_piqa"):
        ((_, task),) = manager.load([name])["tasks"].items()
        task.set_config("num_fewshot", 0)
        task.build_all_requests()
        requests.append([request.args for request in task.instances])
    stock, own = requests
    assert [args for args in own if args[0]] == stock
    assert own[2] == ("", "Question: see the cat\nAnswer:")
    for request in task.instances:
        request.resps = [(-1.0, False)]
    task.apply_filters()
    lengths = [request.filtered_resps["none"][2] for request in task.instances[:3]]
    assert lengths[2] == len(byte_tokenizer()(own[2][1])["input_ids"])


def test_an_answer_given_as_text_counts_and_has_one_blank(checkpoint_path: Path, hub: Path) -> None:
    task = load_tasks(["umim_copa"])["umim_copa"]
    task.build_all_requests()
    assert task.instances[1].args == ("The cat was here therefore", " i went.")
    doc = task.eval_docs[1]
    worse, better = (-9.0, False, 2), (-1.0, False, 2)
    for scores, right in (([worse, better], 1.0), ([better, worse], 0.0)):
        assert task.process_results(doc, [*scores, (-1.0, False, 3)])["acc_seq"] == right
    model = UmimLM(checkpoint_path, device="cpu", batch_size=4)
    result = score_range(model, task, range(2)).figures()
    assert {"acc", "acc_norm", "acc_seq_stderr"} <= result.keys() and result["questions"] == 2


def make(wish: Wish, number: int) -> tuple[dict[str, str], tuple[str, ...]]:
    texts = ("the cat sat on the mat and the dog", "by the sea the old cat house near the log")
    return {"text": texts[number]}, ("the cat",)


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
def metadata(checkpoint_path: Path) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        GENERATION_TASKS.names()
        patch.setitem(GENERATION_TASKS._found, OWN.name, OWN)
        yield {"checkpoint": str(checkpoint_path), "task_questions": 2}


def run_generated(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    config = {"task": OWN.name, "class": GenerationTask}
    manager = TaskManager(include_defaults=False, metadata=metadata)
    found = evaluate(lm=model, task_dict=manager.load([config]), bootstrap_iters=10)
    assert found is not None
    return dict(found)


def test_figures_are_means_with_standard_errors_and_samples_hold_reductions(
    metadata: dict[str, Any],
) -> None:
    model = UmimLM(metadata["checkpoint"], merge="all")
    found = run_generated(model, metadata)
    result, samples = found["results"][OWN.name], found["samples"][OWN.name]
    for figure in (*FIGURES, "prompt_tr", "gen_kv_tr", "cumulative_kv_tr"):
        values = [sample[figure] for sample in samples]
        mean = sum(values) / 2
        assert result[f"{figure},none"] == pytest.approx(mean)
        # two values lie equally far from their mean: the standard error is that distance
        assert result[f"{figure}_stderr,none"] == pytest.approx(abs(values[0] - mean))
    assert result["prompt_tr,none"] > 0
    assert model.realised["context_token_reduction"] is not None
    lengths = [sample["doc"]["prompt_tokens"] for sample in samples]
    saved = sum(s["prompt_tr"] * n for s, n in zip(samples, lengths, strict=True))
    assert saved / sum(lengths) == pytest.approx(model.realised["context_token_reduction"])


def test_a_cell_beyond_the_context_asks_nothing_and_says_so(metadata: dict[str, Any]) -> None:
    class Mute(HFLM):  # type: ignore[misc]  # lm-eval ships no types
        def _model_generate(self, *_: object, **__: object) -> None:
            raise AssertionError("the model was asked")

    backbone = UmimLM(metadata["checkpoint"], merge="none").backbone
    mute = Mute(backbone.model, tokenizer=backbone.tokenizer, batch_size=1)
    found = run_generated(mute, metadata | {"max_length": 47})
    result = found["results"][OWN.name]
    assert {result[f"{figure},none"] for figure in FIGURES} == {"not run: context"}
    assert result["recall_stderr,none"] == "N/A"
    assert found["configs"][OWN.name]["metadata"]["not_run"] == NOT_RUN
    with pytest.raises(AssertionError, match="was asked"):
        run_generated(mute, metadata | {"max_length": 48})


def test_a_tokenizer_alone_measures_texts_for_a_model_of_unknown_context(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "words")
    own = {"tokenizer": str(tmp_path / "words"), "model": "a-service", "task_questions": 2}
    found = generation_config(OWN, own)["metadata"]
    assert found["context"] is None  # type: ignore[index]  # of a plain dict
    assert generation_config(OWN, metadata)["metadata"]["context"] == 48  # type: ignore[index]


WORDS = [f"w{number}" for number in range(1, 10)]


def task_of(kind: str, metric: str, **options: object) -> Any:
    own = {"doc_to_text": "{{text}} w1", "metric_list": [{"metric": metric}]}
    rows = [{"text": word} for word in WORDS]
    return load_tasks([task_config(kind, rows, kind, **own, **options)])[kind]


def choices(**options: object) -> Any:
    own = {"doc_to_choice": ["w2", "w3"], "doc_to_target": 1}
    return task_of("multiple_choice", "acc", **own, **options)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> UmimLM:
    return UmimLM(tiny_checkpoint, "none", batch_size=4)


def test_examples_do_not_depend_on_what_was_scored_before(model: UmimLM) -> None:
    task = choices(num_fewshot=3)
    fresh = score_range(model, task, range(2, 4))
    score_range(model, task, range(1))
    assert score_range(model, task, range(2, 4)) == fresh
    assert len(set(fresh.prompts)) == len(fresh.values["acc"]) == 2


def test_a_task_with_several_filters_has_a_figure_of_each(model: UmimLM) -> None:
    first = {"filter": [{"function": "take_first"}]}
    task = choices(filter_list=[{"name": "strict", **first}, {"name": "loose", **first}])
    found = score_range(model, task, range(2))
    assert found.values.keys() == {"acc,strict", "acc,loose"}
    assert found.values["acc,strict"] == score_range(model, choices(), range(2)).values["acc"]
    assert described(task, "digest").count == len(WORDS)


def test_answers_of_any_generating_task_are_kept(model: UmimLM) -> None:
    own = {"doc_to_target": "w2", "generation_kwargs": {"until": [], "max_gen_toks": 3}}
    task = task_of("generate_until", "exact_match", **own)
    found = score_range(model, task, range(2))
    assert [len(texts) for texts in found.answers] == [1, 1]
    assert found.values.keys() == {"exact_match"}
    assert described(task, "x").limits == {"new_tokens": 3, "answers": 1}


def test_shards_of_other_seeds_draw_other_answers() -> None:
    assert len({shard_seed(seed, first) for seed in range(8) for first in range(8)}) == 64
    assert shard_seed(0, 1) == shard_seed(0, 1) != shard_seed(1, 0)


PROGRAM = {
    "task_id": "add",
    "prompt": 'def add(a, b):\n    """Add two numbers."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "canonical_solution": "    return a + b\n",
}


def test_code_is_run_only_when_lm_evals_command_confirms_it(
    checkpoint_path: Path, local_hub: Path
) -> None:
    answers = [
        PROGRAM["canonical_solution"],
        "    return a - b\n",
        "    return a +",
        "    return 5\n",
    ]
    assert code_tests(answers, PROGRAM) == {"pass@1": 0.5, "pass@4": 1.0}
    write_rows(local_hub / "openai" / "openai_humaneval" / "test.jsonl", [PROGRAM])
    task = load_tasks(["umim_humaneval"])["umim_humaneval"]
    task.set_config("repeats", 4)
    task.set_config("generation_kwargs", task.get_config("generation_kwargs") | {"max_gen_toks": 2})
    loaded: Any = {"tasks": {"umim_humaneval": task}, "groups": {}, "group_map": {}}
    model = UmimLM(str(checkpoint_path), "none", device="cpu", batch_size=4, max_length=256)
    with pytest.raises(ValueError, match="unsafe"):
        evaluate(lm=model, task_dict=loaded, bootstrap_iters=0)
    found = evaluate(lm=model, task_dict=loaded, bootstrap_iters=0, confirm_run_unsafe_code=True)
    assert found is not None
    (sample,) = found["samples"]["umim_humaneval"]
    assert len(sample["filtered_resps"][0]) == 4
    figures = found["results"]["umim_humaneval"]
    assert figures["pass@1,none"] == figures["pass@4,none"] == 0.0


def hand_made(sums: list[list[float]], total: Sizes) -> QuestionScores:
    return QuestionScores(choice_values(sums, [[2, 4]] * 3, [[1, 9]] * 3, [0, 1, 1]), total=total)


def test_figures_of_a_hand_made_case() -> None:
    base = hand_made([[-2, -8], [-2, -8], [-6, -10]], Sizes(16, 16, 10, 10))
    merged = hand_made([[-2, -8], [-6, -8], [-4, -10]], Sizes(16, 14, 10, 8))
    assert base.values["acc_tok"] == [1.0, 0.0, 1.0]
    assert merged.values == {
        "acc": [1.0, 0.0, 0.0],
        "acc_norm": [0.0, 1.0, 1.0],
        "acc_tok": [1.0, 1.0, 0.0],
        "margin": [1.0, 1.0, -0.5],
    }
    found = compared(merged, base)
    assert found["token_reduction"] == pytest.approx(0.2)
    assert found["input_reduction"] == pytest.approx(2 / 16)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["difference"] == 0.0
    assert found["difference_se"] == pytest.approx((2 / 2) ** 0.5 / 3**0.5)  # steps 0, 1, -1
    assert (found["gained"], found["lost"]) == (1.0, 1.0)
    assert found["margin_difference"] == pytest.approx((0.0 + 2.0 - 1.0) / 3)
    assert "difference" not in compared(base, None)
    tied = choice_values([[-1, -1]] * 2, [[1, 1]] * 2, [[1, 1]] * 2, [0, 1])
    assert tied["acc_tok"] == [1.0, 0.0] and tied["margin"] == [0.0, 0.0]


@pytest.mark.parametrize("merge", ["none", "prompt", "all"])
def test_accuracy_and_reduction_are_those_of_lm_eval(
    tiny_umim: UMIM, tiny_checkpoint: Path, tmp_path: Path, merge: Merge
) -> None:
    data, form = write_questions(tmp_path), TASKS.find(DEFAULT_TASK).form
    found = evaluate_task(tiny_checkpoint, data / "test.jsonl", form, merge=merge)
    task = load_tasks([DEFAULT_TASK], {"task_data": str(data)})[DEFAULT_TASK]
    settings = {"dtype": "float32", "device": "cpu", "batch_size": 4, "raw_tail": 0}
    model = UmimLM(tiny_checkpoint, merge, **settings).sharing_contexts()
    theirs = score_range(model, task, range(len(task.eval_docs))).figures()
    for name in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "questions"):
        assert found[name] == pytest.approx(theirs[name]), name
    assert (
        found["questions"]
        > evaluate_task(tiny_checkpoint, data / "test.jsonl", form, limit=1)["questions"]
        == 1
    )
    if merge == "all":
        assert found["token_reduction"] == theirs["token_reduction"] > 0
        return
    reduction = model.realised["context_token_reduction"]
    assert found["context_token_reduction"] == pytest.approx(reduction)
    assert (reduction > 0) is (merge == "prompt")
    merged_model = tiny_umim.merged_model.reading(merge)
    questions = read_questions(data / "test.jsonl")
    for batch in (1, 3):
        scores = score_choices(questions, form, merged_model, batch, max_tokens=60)
        assert scores.figures()["acc_tok"] == pytest.approx(found["acc_tok"])


def test_a_task_without_questions_is_refused(tiny_umim: UMIM) -> None:
    with pytest.raises(EvaluationError, match="a task must have questions"):
        score_choices([], TASKS.find(DEFAULT_TASK).form, tiny_umim.merged_model, 1)
