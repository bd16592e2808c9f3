"""Multiple-choice tasks of lm-eval with the paper's accuracy: mean NLL of the whole sequence.

    task: umim_piqa
    class: !function umim_core.evaluation.tasks.sequence_task.SequenceTask
    stock: piqa/piqa                      data and prompt are those of lm-eval's own task

A question asks for one likelihood more than lm-eval's: that of its prompt alone. With K answers::

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

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_metric
from lm_eval.api.task import ConfigurableTask
from transformers import PreTrainedTokenizerBase

from umim_core.adaptation.choices import encode_pair
from umim_core.evaluation.console import one_line_errors
from umim_core.evaluation.tasks.paper_task import with_stock
from umim_core.evaluation.tasks.task_backbone import task_tokenizer
from umim_core.text.token_ids import encode

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
