"""Generation in lm-eval: texts of hf without rules, draws, refused kwargs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise as pairwise_of
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from support.merged_models import fresh_model
from support.pairwise import pairwise
from support.tiny_models import random_model, tiny_config, written_by_transformers
from tests.evaluation.conftest import TEXT, byte_tokenizer, instances
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError
from umim_core.evaluation.harness import UmimLM

PROMPTS = ["the cat sat on the", "by the sea", "near the old cat house by the", "the dog\n"]
NEW = 12
MERGES = ("prompt", "all", "none")
BATCHES = (1, 4)
ALPHABET = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # ASCII: any tokens are a text


@dataclass(frozen=True)
class Case:
    """Settings of the model's generation_config, kwargs of the task, and the prompts.

    ``stops`` (k, a, b) are what the free text of prompt k has between its tokens a and b, the
    prompt's last token being -1; ``ends`` (k, place) further end tokens in the free texts;
    ``batch_of_hf`` the batch size whose texts of ``hf`` count, where they depend on it.
    """

    own: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[tuple[int, int, int], ...] = ()
    ends: tuple[tuple[int, int], ...] = ()
    prompts: tuple[str, ...] = tuple(PROMPTS)
    bos: bool = False
    batch_of_hf: int | None = None

    @cached_property
    def backbone(self) -> Backbone:
        tokenizer = byte_tokenizer(ALPHABET)
        if self.bos:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = tiny_config(**sizes, **ends, initializer_range=0.3)  # sure enough of its tokens
        model = random_model(config, seed=1).double()
        model.generation_config = GenerationConfig(**ends | self.own)
        return wrap_backbone(model, tokenizer)

    @cached_property
    def free(self) -> list[tuple[list[int], list[int]]]:
        """Ids of each prompt, and the model's own greedy continuation."""
        rows = [self.backbone.encode(prompt)[-(64 - NEW) :] for prompt in self.prompts]
        model = self.backbone.model
        return [(ids, written_by_transformers(model, ids, NEW, do_sample=False)) for ids in rows]

    @cached_property
    def requests(self) -> list[Instance]:
        """With stop strings, while the model has its end tokens."""
        if ends := [self.free[k][1][place] for k, place in self.ends]:
            self.backbone.model.generation_config.eos_token_id = [0, *ends]
        parts = [[*self.free[k][0][-1:], *self.free[k][1]][a + 1 : b + 1] for k, a, b in self.stops]
        return self.asked(until=[self.backbone.decode(ids) for ids in parts])

    def asked(self, **options: object) -> list[Instance]:
        settings = {"until": [], "max_gen_toks": NEW, **self.options, **options}
        return instances("generate_until", ((prompt, settings) for prompt in self.prompts))

    def hf(self, batch_size: int) -> HFLM:
        model, tokenizer = self.backbone.model, self.backbone.tokenizer
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def ours(self, merge: str, batch_size: int, spans: Iterable[tuple[int, ...]] = ()) -> UmimLM:
        """Without a raw tail."""
        made = Checkpoint.of(fresh_model(self.backbone, spans, 0.3)).recommending("all")
        return UmimLM(made, merge, self.backbone, batch_size=batch_size)


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
    "settings of sampling": Case({"top_k": 9}, {"do_sample": True, "temperature": 0.7, "top_k": 1}),
}


@cache
def texts_of_hf(name: str, batch_size: int) -> list[str]:
    return CASES[name].hf(batch_size).generate_until(CASES[name].requests)


@pairwise(name=list(CASES), merge=MERGES, batch_size=BATCHES)
def test_without_rules_texts_are_those_of_hf(name: str, merge: str, batch_size: int) -> None:
    case = CASES[name]
    theirs = texts_of_hf(name, case.batch_of_hf or batch_size)
    size = 1 if merge == "none" and case.batch_of_hf else batch_size
    assert case.ours(merge, size).generate_until(case.requests) == theirs
    assert len(set(theirs)) > 1


@pytest.mark.parametrize("merge", ["prompt", "all"])
@pytest.mark.parametrize("batch_size", BATCHES)
def test_with_rules_the_raw_text_alone_decides_stops(merge: str, batch_size: int) -> None:
    case = Case()
    spans = {pair for row in case.free for ids in row for pair in pairwise_of(ids) if 0 not in pair}
    free = case.ours(merge, 1, spans).generate_until(case.asked())
    model = case.ours(merge, batch_size, spans)
    for whole in free:
        stop = whole[3:5]
        cut = model.generate_until(case.asked(until=[stop]))
        assert cut == [text.split(stop)[0] for text in free]
        assert cut != free
    assert model.realised["token_reduction"] > 0


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_a_request_draws_the_same_whatever_stands_beside_it(merge: str) -> None:
    own = {"do_sample": True, "num_return_sequences": 2}  # lm-eval says how many texts there are
    case = Case(own, {"do_sample": True, "temperature": 1.0})
    hot = {"until": ["x"], "max_gen_toks": 5, "do_sample": True, "temperature": 2.0}
    other = instances("generate_until", ((prompt, hot) for prompt in PROMPTS[::-1]))
    requests = [*case.requests, *case.requests[:1] * 8]  # as lm-eval repeats one
    found = []
    with torch.random.fork_rng(devices=[]):
        for batch_size, beside in ((1, []), (4, []), (3, other)):
            torch.manual_seed(1234)  # as lm-eval does before it evaluates
            texts = case.ours(merge, batch_size).generate_until(requests + beside)
            found.append(texts[: len(requests)])
        again = case.ours(merge, 4).generate_until(requests)
    assert found[0] == found[1] == found[2]
    assert again != found[0]  # another evaluation without a seed draws anew
    assert len(set(found[0][-8:])) == 8  # repeats of a request are texts of their own


def test_kwargs_without_effect_are_reported_once_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case(options={"early_stopping": "never", "use_cache": True, "max_length": 30})
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level(logging.WARNING, "lm_eval"):
        texts = case.ours("all", 1).generate_until(case.requests)
    assert all(texts)
    lines = [line for line in caplog.messages if line.startswith("umim: ")]
    assert len(lines) == len(set(lines))
    for name in ("early_stopping", "use_cache", "max_length"):
        assert any(name in line for line in lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"max_gen_toks": "few"}, "must be numbers; got .*few"),
        ({"temperature": "hot", "do_sample": True}, "and temperature must be numbers; got .*hot"),
        ({"temperature": math.nan}, "and temperature must be numbers; got temperature nan"),
        ({"max_gen_toks": math.inf}, "must be numbers; got cannot convert float infinity"),
        ({"max_length": math.nan}, "max_length must be an integer; got nan"),
        ({"do_sample": True, "temperature": 0.0}, "out of range"),
        ({"decode_max_damage": "most"}, "decode_max_damage must be a number"),
        ({"top_p": 7.0, "do_sample": True, "temperature": 1.0}, "out of range"),
    ],
)
def test_kwargs_that_cannot_be_honoured_are_refused_by_name(
    options: dict[str, object], named: str
) -> None:
    case = Case(options=options)
    with pytest.raises(GenerationError, match=named):
        case.ours("all", 1).generate_until(case.requests)
