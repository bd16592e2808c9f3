"""Tiny models of lm-eval's ``hf`` and ours for the contract of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.tiny_models import random_model, tiny_config, written_by_transformers
from tests.evaluation.conftest import byte_tokenizer
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.harness import UmimLM
from umim_core.rules.ruleset import RuleSet

PROMPTS = ["the cat sat on the", "by the sea", "near the old cat house by the", "the dog\n"]
NEW = 12
MERGES = ("prompt", "all", "none")
BATCHES = (1, 4)
ALPHABET = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # ASCII: any tokens are a text


def model_of(own: dict[str, Any], vocabulary: int) -> PreTrainedModel:
    """A random model in double precision, sure enough of its tokens, with its own settings."""
    config = tiny_config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = random_model(config, seed=1).double()
    model.generation_config = GenerationConfig(**{"eos_token_id": 0, "bos_token_id": 0, **own})
    return model


@dataclass(frozen=True)
class Case:
    """What a case asks for.

    Attributes:
        own: Settings of the model's generation_config.
        options: Generation kwargs of the task; texts in ``until`` that are numbers (k, a, b) stand
            for what the free text of prompt k has between its tokens a and b, the prompt's last
            token being -1.
        ends: The model's further end tokens, as (k, place) in the free texts.
        prompts: The prompts.
        bos: Whether the tokenizer adds a BOS.
        batch_of_hf: The batch size whose texts of ``hf`` count, where they depend on it.
    """

    own: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[tuple[int, int, int], ...] = ()
    ends: tuple[tuple[int, int], ...] = ()
    prompts: tuple[str, ...] = tuple(PROMPTS)
    bos: bool = False
    batch_of_hf: int | None = None


class Models:
    """The models of a case: ``hf`` and ours without rules."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tokenizer = byte_tokenizer(ALPHABET)
        if case.bos:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
        self.backbone = wrap_backbone(model_of(case.own, len(tokenizer)), tokenizer)
        self.checkpoint = Checkpoint.of(fresh_model(self.backbone, RuleSet.from_spans([]), 0.3))

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.backbone.tokenizer

    def hf(self, batch_size: int) -> HFLM:
        return HFLM(pretrained=self.backbone.model, tokenizer=self.tokenizer, batch_size=batch_size)

    def ours(self, merge: str, batch_size: int) -> UmimLM:
        return UmimLM(self.checkpoint, merge, self.backbone, batch_size=batch_size)

    def requests(self, **options: object) -> list[Instance]:
        settings = {"until": [], "max_gen_toks": NEW, **self.case.options, **options}
        return [
            Instance("generate_until", {}, (prompt, settings), i)
            for i, prompt in enumerate(self.case.prompts)
        ]


def free_ids(models: Models, prompt: str) -> tuple[list[int], list[int]]:
    """A prompt's ids and the model's own greedy continuation."""
    ids = models.tokenizer(prompt)["input_ids"][-(64 - NEW) :]
    return ids, written_by_transformers(models.backbone.model, ids, NEW, do_sample=False)


def span(models: Models, prompt: list[int], ids: list[int], a: int, b: int) -> str:
    """The text of generated tokens a .. b; -1 is the prompt's last."""
    text = models.tokenizer.decode([*prompt[-1:], *ids][a + 1 : b + 1])
    assert text
    return text
