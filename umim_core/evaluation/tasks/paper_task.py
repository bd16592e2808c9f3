"""Tasks of the paper on data and prompts of lm-eval's own: other metrics, longer or more answers.

A YAML file of this folder names such a task. ``stock`` is the file of lm-eval's task under
``lm_eval/tasks`` that it starts from, ``text_metrics`` names metrics of generated texts; all other
fields are lm-eval's and win over those of the stock task::

    task: umim_qmsum                                    task: umim_piqa
    class: !function umim_core...paper_task.PaperTask   class: !function ...paper_task.SequenceTask
    stock: longbench/qmsum                              stock: piqa/piqa
    text_metrics: [rouge]

A question of a ``SequenceTask`` (multiple choice) asks for one likelihood more than lm-eval's: that
of its prompt alone. With K answers::

    log p(answer_k | prompt)     n_k tokens, k = 1..K; acc and acc_norm are made of them
    log p(prompt)                T tokens, after the backbone's prefix token, as lm-eval scores a
                                 text without context
    acc_seq                      answer of the least
                                 -(log p(prompt) + log p(answer_k | prompt)) / (T + n_k)

The first term is common to all answers; it weighs lengths. Both are scored as the model's mode
merges: under ``merge=prompt`` the prompt that answers follow is compressed, while its own
likelihood is that of raw tokens.

Source: paper, "Multiple-Choice QA": "concatenate the task prompt, question, and candidate into one
sequence and compute its length-normalized negative log-likelihood".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_metric
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.aime.utils import process_results
from transformers import PreTrainedTokenizerBase

from umim_core.adaptation.choices import encode_pair
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.evaluation.console import one_line_errors
from umim_core.evaluation.generated_rows import REDUCTIONS, GeneratedText
from umim_core.evaluation.model_args import task_tokenizer
from umim_core.evaluation.text_metrics.code_tests import PASS_FIGURES, pass_figures
from umim_core.evaluation.text_metrics.text_metric import (
    TEXT_METRICS,
    TextMetric,
    add_text_metric,
    mean_figures,
)
from umim_core.text.token_ids import encode

FEATURES: Final = "task_features"  # in --metadata: model whose states BERTScore compares
_OWN: Final = ("class", "stock", "text_metrics", "tag")


class PaperTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A task whose answers our metrics judge."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        features = (config.get("metadata") or {}).get(FEATURES)
        metrics = [TEXT_METRICS.find(name) for name in config["text_metrics"]]
        if features is None:
            metrics = [metric for metric in metrics if not metric.needs_features]
        else:
            load_tokenizer(features)  # a wrong name is an error before anything is generated
        filled_in = with_stock(config)
        references = filled_in["doc_to_target"]

        def judge(row: Mapping[str, Any], answers: Sequence[Any]) -> dict[str, float]:
            known = row[references]
            texts = [str(text) for text in known] if isinstance(known, list) else [str(known)]
            return judged(metrics, {**row, "references": texts, "features": features}, answers[0])

        super().__init__(config=filled_in | figures_config(metrics) | {"process_results": judge})


def with_stock(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's configuration, what it leaves out filled in from its stock task."""
    own = {name: value for name, value in config.items() if name not in _OWN}
    if "stock" not in config:
        return own
    (folder,) = lm_eval.tasks.__path__
    stock = load_yaml(Path(folder) / f"{config['stock']}.yaml")
    metadata = (stock.get("metadata") or {}) | (own.get("metadata") or {})
    return (
        {name: value for name, value in stock.items() if name not in _OWN}
        | own
        | {"metadata": metadata}
    )


def figures_config(metrics: Sequence[TextMetric]) -> dict[str, Any]:
    """Return lm-eval's configuration of the figures of some metrics, which see every answer."""
    figures = [figure for metric in metrics for figure in metric.figures]
    return {
        "filter_list": [{"name": "none", "filter": []}],
        "metric_list": [
            {"metric": figure, "aggregation": "mean", "higher_is_better": True}
            for figure in (*figures, *REDUCTIONS)
        ],
        "should_decontaminate": False,
        "unsafe_code": any(metric.runs_code for metric in metrics),
    }


def judged(
    metrics: Sequence[TextMetric], row: Mapping[str, Any], texts: Sequence[str]
) -> dict[str, float]:
    """Return the figures of all answers to a question, and what their requests saved."""
    figures: dict[str, float] = {}
    for metric in metrics:
        figures |= metric.score(texts, row)
    saved = [text.reductions for text in texts if isinstance(text, GeneratedText)]
    return figures | (mean_figures(saved) if len(saved) == len(texts) else {})


@add_text_metric("contest_answer", *PASS_FIGURES)
def contest_answer(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    r"""Return pass@k of all answers to a problem, as lm-eval's AIME tasks judge each.

    The answer is the last ``\boxed{...}``; it is a whole number, of which ``27.0`` is a spelling.
    """
    (reference,) = row["references"]
    problem = {"answer": reference.removesuffix(".0")}
    return pass_figures([process_results(problem, [text])["exact_match"] == 1 for text in texts])


SEQUENCE_METRIC: Final = "acc_seq"
Scored = tuple[float, bool, int]  # log-probability, whether greedy decoding gives it, tokens


class SequenceTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A multiple-choice task that reports ``acc_seq`` beside lm-eval's accuracies.

    Attributes:
        tokenizer: Counts tokens; where it is None, that of the model which lm-eval's command names
            is loaded.
    """

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        self.tokenizer: PreTrainedTokenizerBase | None = None
        metrics = [{"metric": name} for name in (SEQUENCE_METRIC, "acc", "acc_norm")]
        super().__init__(config=with_stock(config) | {"metric_list": metrics})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return a request per answer, and one of the prompt alone."""
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
        """Return the metrics of a question."""
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
