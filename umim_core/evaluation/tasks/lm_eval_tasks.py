"""Tasks for lm-eval: the paper's on data of lm-eval's own, those of ``task_sets``; their runs.

A YAML file of this folder names a task of the paper. ``stock`` is the file of lm-eval's task under
``lm_eval/tasks`` that it starts from, ``text_metrics`` names metrics of generated texts; all other
fields are lm-eval's and win over those of the stock task::

    task: umim_qmsum                            task: umim_piqa
    class: !function umim_core...PaperTask      class: !function umim_core...SequenceTask
    stock: longbench/qmsum                      stock: piqa/piqa
    text_metrics: [rouge]

A question of a ``SequenceTask`` (multiple choice) asks for one likelihood more than lm-eval's: that
of its prompt alone. With K answers::

    log p(answer_k | prompt)     n_k tokens, k = 1..K; acc and acc_norm are made of them
    log p(prompt)                T tokens, after the backbone's prefix token, as lm-eval scores a
                                 text without context
    acc_seq                      answer of the least
                                 -(log p(prompt) + log p(answer_k | prompt)) / (T + n_k)

The first term is common to all answers; it weighs lengths. Both are scored as the model's mode
merges: under ``merge=prompt`` the prompt that answers follow is compressed, its own likelihood is
that of raw tokens.

Source: paper, "Multiple-Choice QA": "concatenate the task prompt, question, and candidate into one
sequence and compute its length-normalized negative log-likelihood".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final

import lm_eval.tasks
import numpy as np
from datasets import Dataset, DatasetDict
from datasets import config as datasets_config
from datasets.exceptions import DatasetsError
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_metric
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import PreTrainedTokenizerBase

from umim_core.adaptation.choices import encode_pair
from umim_core.backbone.shape import trained_context
from umim_core.backbone.tokenizer_files import load_tokenizer, save_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.model_base import Split
from umim_core.errors import ConfigError, CorpusError, MissingExtraError, did_you_mean, require
from umim_core.evaluation.generated_rows import GeneratedText
from umim_core.evaluation.model_args import checkpoint_config, named_checkpoint, one_line_errors
from umim_core.evaluation.sizes import REDUCTIONS
from umim_core.evaluation.text_metrics import TextMetric, find_metrics, mean_figures
from umim_core.store.artifacts import directory_digest
from umim_core.task_sets.generation_spec import (
    GENERATION_TASKS,
    GenerationRow,
    GenerationSet,
    TaskOptions,
    make_rows,
    new_tokens,
)
from umim_core.task_sets.spec import TASKS, Question, QuestionForm, TaskSet, read_questions
from umim_core.text.token_ids import encode

_RULER_TOKENS: Final = 4096
_OWN: Final = ("class", "stock", "text_metrics", "tag")


class PaperTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A task whose answers our metrics judge."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        filled_in = with_stock(config)
        features = TaskOptions.read(filled_in.get("metadata") or {}).task_features
        metrics = find_metrics(config["text_metrics"])
        if features is None:
            metrics = [metric for metric in metrics if not metric.needs_features]
        else:
            load_tokenizer(features)  # a wrong name is an error before anything is generated

        def judge(row: Mapping[str, Any], answers: Sequence[Any]) -> dict[str, float]:
            known = row[filled_in["doc_to_target"]]
            texts = [str(text) for text in (known if isinstance(known, list) else [known])]
            return judged(metrics, {**row, "references": texts, "features": features}, answers[0])

        super().__init__(config=filled_in | figures_config(metrics) | {"process_results": judge})


def with_stock(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's configuration, what it leaves out filled in from its stock task."""
    filled_in: dict[str, Any] = {}
    if "stock" in config:
        (folder,) = lm_eval.tasks.__path__
        filled_in = load_yaml(Path(folder) / f"{config['stock']}.yaml")
    metadata = (filled_in.get("metadata") or {}) | (config.get("metadata") or {})
    TaskOptions.read(metadata)  # a misspelt one is an error
    filled_in = {**filled_in, **config} | ({"metadata": metadata} if metadata else {})
    return {name: value for name, value in filled_in.items() if name not in _OWN}


def figures_config(metrics: Sequence[TextMetric]) -> dict[str, Any]:
    """Return lm-eval's configuration of the figures of some metrics, which see every answer."""
    figures = [figure for metric in metrics for figure in metric.figures]
    return {
        "filter_list": [{"name": "none", "filter": []}],
        "metric_list": _means(*figures, *REDUCTIONS),
        "should_decontaminate": False,
        "unsafe_code": any(metric.runs_code for metric in metrics),
    }


def _means(*figures: str) -> list[dict[str, Any]]:
    return [{"metric": each, "aggregation": "mean", "higher_is_better": True} for each in figures]


def judged(
    metrics: Sequence[TextMetric], row: Mapping[str, Any], texts: Sequence[str]
) -> dict[str, float]:
    """Return the figures of all answers to a question, and what their requests saved."""
    figures: dict[str, float] = {}
    for metric in metrics:
        figures |= metric.score(texts, row)
    saved = [text.reductions for text in texts if isinstance(text, GeneratedText)]
    return figures | (mean_figures(saved) if len(saved) == len(texts) else {})


SEQUENCE_METRIC: Final = "acc_seq"
Scored = tuple[float, bool, int]  # log-probability, whether greedy decoding gives it, tokens


class SequenceTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A multiple-choice task that reports ``acc_seq`` beside lm-eval's accuracies.

    Its ``tokenizer`` counts tokens; None is that of the model which lm-eval's command names.
    """

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        self.tokenizer: PreTrainedTokenizerBase | None = None
        metrics = [{"metric": name} for name in (SEQUENCE_METRIC, "acc", "acc_norm")]
        super().__init__(config=with_stock(config) | {"metric_list": metrics})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        requests: list[Instance] = super().construct_requests(doc, ctx, **kwargs)
        prompt = ("", ctx.rstrip())  # blanks at its end belong to the answers
        alone = Instance("loglikelihood", doc, prompt, len(requests), kwargs["metadata"])
        return [*requests, alone]

    def apply_filters(self) -> list[Instance]:
        """Filter the responses, then add to each the number of tokens that it scores."""
        super().apply_filters()
        requests: list[Instance] = self.instances
        if self.tokenizer is None:
            self.tokenizer = task_tokenizer(self.config.metadata)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        prefix = eos if bos is None else bos
        for request in requests:
            context, text = request.args
            scored = encode_pair(partial(encode, self.tokenizer), context, text)[1]
            # A text that begins with the prefix token is scored behind it.
            tokens = len(scored) - (not context and scored[0] == prefix)
            for name, response in request.filtered_resps.items():
                request.filtered_resps[name] = (*response, tokens)
        return requests

    def process_results(self, doc: dict[str, Any], results: Sequence[Scored]) -> dict[str, float]:
        *answers, (prompt, _, tokens) = results
        figures: dict[str, float] = super().process_results(doc, [answer[:2] for answer in answers])
        means = [(prompt + score) / (tokens + length) for score, _, length in answers]
        gold = self.doc_to_target(doc)
        if isinstance(gold, str):  # the answer's text
            gold = self.doc_to_choice(doc).index(gold)
        figures[SEQUENCE_METRIC] = float(means.index(max(means)) == gold)
        return figures


@register_metric(  # type: ignore[untyped-decorator]  # lm-eval ships no types
    metric=SEQUENCE_METRIC, higher_is_better=True, aggregation="mean"
)
def _hit(items: float) -> float:
    """Let lm-eval know the name; `SequenceTask.process_results` computes the metric."""
    return items


NOT_RUN: Final = "not run: context"


class SpecTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A task that a YAML file names, for lm-eval's own command; all else is in its ``TaskSet``."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        TaskOptions.read(config["metadata"])
        filled_in = lm_eval_config(TASKS.find(config["task"]))
        super().__init__(
            config=filled_in | {"metadata": filled_in["metadata"] | config["metadata"]}
        )


def lm_eval_config(task: TaskSet) -> dict[str, Any]:
    return {
        "task": task.name,
        "custom_dataset": partial(load_splits, task),
        "training_split": "train" if "train" in task.splits else None,
        "validation_split": "valid" if "valid" in task.splits else None,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": task.form.prompt.replace("{context}", "{{context}}"),
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "target_delimiter": task.form.delimiter,
        "should_decontaminate": False,
        "metric_list": _means("acc", "acc_norm"),
        "metadata": {"version": 1.0},
    }


def load_splits(task: TaskSet, task_data: str | None = None, **metadata: object) -> DatasetDict:
    """Load a task's splits, with the columns context, choices and gold, for lm-eval.

    ``task_data`` is a folder with a file per split; by default one that is written once from the
    task's own source. lm-eval passes the task's metadata and the model's arguments, too.
    """
    folder = Path(task_data) if task_data else task.built()
    rule = "task_data must name a folder with a .jsonl file of each split"
    remedy = f"Correct it, or leave it out. The splits are {', '.join(task.splits)}."
    require(folder.is_dir(), CorpusError, rule, str(folder), remedy)
    splits = {
        split: [
            {"context": question.context, "choices": question.choices, "gold": question.gold}
            for question in read_questions(folder / f"{split}.jsonl")
        ]
        for split in task.splits
    }
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


class GenerationTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A generation task; all but its name is in its ``GenerationSet``.

    One that is longer than the backbone was trained for asks the model nothing, and each of its
    figures is the text ``not run: context``.
    """

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        task = GENERATION_TASKS.find(config["task"])
        super().__init__(config=generation_config(task, config.get("metadata") or {}))


def generation_config(task: GenerationSet, metadata: Mapping[str, Any]) -> dict[str, Any]:
    options, context = TaskOptions.read(metadata), task_context(metadata)
    metrics = find_metrics(task.metrics)
    runs = context is None or task.length <= context
    rows = make_rows(task, options, task_tokenizer(metadata)) if runs else [_NOTHING]
    lengths = [row["prompt_tokens"] for row in rows]
    config = figures_config(metrics) | {
        "task": task.name,
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "references",
        "gen_prefix": "answer_prefix" if task.answer_prefix else None,
        "generation_kwargs": {
            "until": list(task.until),
            "max_gen_toks": new_tokens(task, options),
            "do_sample": False,
        },
        "repeats": 1,
        "process_results": lambda row, answers: judged(metrics, row, answers[0]),
        "metadata": {
            **metadata,
            "version": 1.0,
            **task.key(),
            "context": context,
            "prompt_tokens": [min(lengths), max(lengths)],
            "not_run": None,
        },
    }
    if runs:
        return config
    figures = [figure for metric in metrics for figure in metric.figures]
    return config | {
        "repeats": 0,  # no request reaches the model
        "process_results": lambda row, answers: dict.fromkeys(figures, NOT_RUN),
        "metric_list": [
            metric | {"aggregation": lambda values: values[0]} for metric in config["metric_list"]
        ],
        "metadata": config["metadata"] | {"prompt_tokens": None, "not_run": NOT_RUN},
    }


# Arguments of models that name a backbone: ``umim``'s, ``hf``'s, and those of services.
_NAMES: Final = ("backbone", "pretrained", "model")


def task_context(metadata: Mapping[str, object]) -> int | None:
    """Return how many tokens the backbone was trained for that a model's arguments name.

    lm-eval hands these arguments to a task as part of its metadata, as its own RULER tasks read
    them. ``max_length`` (else the backbone's configuration) is the context; None if it is unknown.
    Arguments that name no backbone are those of ``umim``: the checkpoint's counts, else the default
    checkpoint's.
    """
    most = metadata.get("max_length")
    return most if isinstance(most, int) else trained_context(*_named(metadata))


def task_tokenizer(metadata: Mapping[str, object]) -> PreTrainedTokenizerBase:
    tokenizer = metadata.get("tokenizer")
    if isinstance(tokenizer, str):
        return load_tokenizer(tokenizer)
    name, revision = _named(metadata)
    return load_tokenizer(name, revision=revision)


def _named(metadata: Mapping[str, object]) -> tuple[str, str | None]:
    revision = metadata.get("revision")
    for key in _NAMES:
        name = metadata.get(key)
        if isinstance(name, str):
            return name, revision if isinstance(revision, str) else None
    checkpoint = metadata.get("checkpoint")
    given = checkpoint if isinstance(checkpoint, str | Checkpoint) else None
    config = checkpoint_config(named_checkpoint(given))
    return config.backbone, config.backbone_revision


_NOTHING: Final[GenerationRow] = {
    "id": "none",
    "prompt": NOT_RUN,
    "question": "",
    "answer_prefix": "",
    "references": [NOT_RUN],
    "prompt_tokens": 0,
}


@cache
def _shipped() -> TaskManager:
    """Return the index of lm-eval's own tasks; it takes seconds to build."""
    return TaskManager(metadata={})


def own_config(name: str) -> dict[str, Any] | None:
    """Return the configuration of a task that a YAML file of this package names; None without."""
    path = Path(__file__).parent / f"{name}.yaml"
    return load_yaml(path) if name.isidentifier() and path.is_file() else None


def knows_task(name: str) -> bool:
    """Return whether this package or lm-eval has a task of this name; tags and groups are none."""
    return own_config(name) is not None or name in _shipped().all_subtasks


def _config(task: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return what lm-eval loads a task by: a configuration, or the name of one of its own."""
    if not isinstance(task, str):
        return task
    if task in TASKS.names():
        return lm_eval_config(TASKS.find(task))
    rule = f"a task must be one of {', '.join(TASKS.names())}, or one that lm-eval ships"
    remedy = did_you_mean(task, TASKS.names()) or "`lm-eval ls subtasks` lists lm-eval's."
    require(knows_task(task), ConfigError, rule, task, remedy)
    return own_config(task) or task


def runs_programs(name: str) -> bool:
    """Return whether lm-eval's task of this name runs programs that a model wrote."""
    entry = _shipped().task_index.get(name)
    if entry is None or entry.yaml_path is None:
        return False
    return bool(load_yaml(entry.yaml_path, resolve_func=False).get("unsafe_code"))


def load_tasks(
    tasks: Sequence[str | dict[str, object]], options: dict[str, Any] | None = None
) -> dict[str, Task]:
    """Load tasks, with the examples in the prompt that they ask for, else none, by name."""
    configs = [_config(task) for task in tasks]
    stock = any(isinstance(task, str) for task in configs)
    if stock and not options:
        manager = _shipped()
    else:
        manager = TaskManager(include_defaults=stock, metadata=options or {})
    loaded: dict[str, Task] = manager.load(configs)["tasks"]
    for task in loaded.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)  # as lm-eval's own command
    return loaded


class _RandomModule(random.Random):
    """A generator that stands for the module ``random``."""

    Random = random.Random


def _ruler_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler.")]


def load_ruler(name: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> Task:
    """Load a task of lm-eval's ``ruler``, of 4,096 tokens, the same in every process.

    Its modules are imported anew and draw from generators of their own: with those of the process
    any other thread that draws would change the questions.
    """
    rule = "a task of lm-eval's ruler must be one that it ships"
    require(knows_task(name), ConfigError, rule, name, "`lm-eval ls subtasks` lists them.")
    arrays = SimpleNamespace(**vars(np) | {"random": np.random.RandomState(seed)})
    own = {"random": _RandomModule(seed), "np": arrays}
    for module in _ruler_modules():
        del sys.modules[module]
    try:
        with TemporaryDirectory() as folder:
            save_tokenizer(tokenizer, Path(folder))
            # A mean, since there is one length: lm-eval's own leaves out those not asked for.
            config = load_yaml(_shipped().task_index[name].yaml_path) | {
                "metric_list": _means(str(_RULER_TOKENS)),
                "metadata": {"tokenizer": folder, "max_seq_lengths": [_RULER_TOKENS]},
            }
            for module in _ruler_modules():
                vars(sys.modules[module]).update(own)
            return load_tasks([config])[name]
    except ImportError as error:
        needed = "lm-eval's ruler needs what lm_eval[ruler] installs"
        raise MissingExtraError(needed, str(error), "pip install 'lm_eval[ruler]'") from error
    except (OSError, ValueError, DatasetsError) as error:
        rule = f"the texts of lm-eval's task {name} must be at hand"
        value, remedy = f"{type(error).__name__}: {error}", "It fetches them: give it a network."
        raise CorpusError(rule, value, remedy) from error


def run_task(
    model: LM, task: Task, questions: range | None = None, *, confirm_run_unsafe_code: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one task, all questions or some: lm-eval's metrics and logged samples.

    No global seed is set, no environment is collected.
    """
    name = task.task_name
    results = evaluator.evaluate(
        lm=model,
        task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
        samples=None if questions is None else {name: list(questions)},
        bootstrap_iters=0,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    return results["results"][name], results["samples"][name]


@contextmanager
def standing_for_the_hub(hub: str | None, digest: str) -> Iterator[None]:
    """Let a folder stand for the hub while tasks load their data; None asks the hub, or its cache.

    Each content of the folder, by its digest, has a cache of its own.
    """
    if hub is None:
        yield
        return
    before = datasets_config.HF_DATASETS_CACHE
    datasets_config.HF_DATASETS_CACHE = Path(before) / f"umim-{digest[:16]}"
    try:
        with chdir(hub):  # copies are found by paths that equal the hub's names
            yield
    finally:
        datasets_config.HF_DATASETS_CACHE = before


def harness_questions(
    name: str, hub: Path | None = None
) -> tuple[QuestionForm, dict[Split, list[Question]]]:
    """Return how lm-eval asks a task's questions, and the questions of every split that it has.

    The context is the whole prompt. Where the data set has no test split, lm-eval scores the
    validation split: it is the test split here, and there is no ``valid``. ``hub`` is a folder that
    stands for the hub in the task's data.
    """
    rule = "questions of lm-eval are those of one task that it ships"
    remedy = "`lm-eval ls subtasks` lists them; tags name several."
    require(knows_task(name), ConfigError, rule, name, remedy)
    rule = "a folder that stands for the hub must exist"
    remedy = "Correct hub of the questions, or leave it out."
    require(hub is None or hub.is_dir(), CorpusError, rule, str(hub), remedy)
    digest = "" if hub is None else directory_digest(hub)
    with standing_for_the_hub(None if hub is None else str(hub.resolve()), digest):
        try:
            task = load_tasks([name])[name]
            splits: dict[Split, Any] = {"test": task.eval_docs}
            if task.has_training_docs():
                splits["train"] = task.training_docs()
            if task.has_test_docs() and task.has_validation_docs():
                splits["valid"] = task.validation_docs()
        except (OSError, ValueError, RuntimeError, KeyError, DatasetsError) as error:
            rule = f"the data of lm-eval's task {name} must be at hand, with all its splits"
            value, remedy = f"{type(error).__name__}: {error}", "Name a folder for the hub."
            raise CorpusError(rule, value, remedy) from error
    chosen = task.OUTPUT_TYPE == "multiple_choice"
    rule, value = "a task to adapt to must be multiple choice", f"{name} is {task.OUTPUT_TYPE}"
    require(chosen, ConfigError, rule, value, "Name a task of questions with choices.")
    rule, remedy = "a task to adapt to must have training questions", "Give files (kind: files)."
    require("train" in splits, CorpusError, rule, f"{name} of lm-eval has none", remedy)
    form = QuestionForm("{context}", task.get_config("target_delimiter"), "context")
    return form, {split: _questions(task, docs) for split, docs in splits.items()}


def _questions(task: Task, docs: Iterable[dict[str, Any]]) -> list[Question]:
    questions = []
    for number, doc in enumerate(docs):
        text, choices = task.doc_to_text(doc), task.doc_to_choice(doc)
        gold = task.doc_to_target(doc)
        if isinstance(gold, str) and gold in choices:
            gold = choices.index(gold)
        fits = isinstance(text, str) and isinstance(gold, int)
        rule = f"question {number} of lm-eval's {task.task_name} must have a text and one answer"
        remedy = "Name a task of questions with choices."
        require(fits, CorpusError, rule, {"text": text, "answer": gold}, remedy)
        questions.append(Question(text, tuple(choices), gold, str(doc.get("id", ""))))
    return questions
