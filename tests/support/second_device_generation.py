"""Generation and evaluation on the second device, in a process of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.engine_matrix import (
    build,
    module_for,
    random_prompts,
    random_rules,
    settings,
)
from support.merge_modules import give_rows
from support.second_device import DEVICE, moved, second_device
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.form import UnitPositions
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import EngineOutput
from umim_core.inference.request import Request
from umim_core.merging.merged_model import MergedModel
from umim_core.synthetic_corpora.trajectories import sample_trajectories

SAMPLED = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 8}
PROCESSED = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [2],
    "bad_words_ids": [[1], [2, 3]],
    "eos_token_id": 3,
    "min_new_tokens": 6,
}


def on(device: str, family: str, unit_positions: UnitPositions, *, rules: bool) -> Engine:
    backbone = build(family, torch.float32)
    matcher = random_rules(3, infix_free=False)
    module = give_rows(module_for(backbone), matcher.rules.ids_by_order[2][::2].tolist())
    if device != "cpu":
        moved(backbone.model)
        moved(module)
    return Engine(MergedModel(backbone, module, matcher if rules else None, unit_positions))


def answers(
    device: str,
    family: str = "llama",
    unit_positions: UnitPositions = "compact",
    rules: bool = True,
    turns: int = 1,
    logprobs: int | None = None,
    match_border: bool = False,
    **options: Any,
) -> list[EngineOutput]:
    """Generate in several turns."""
    engine, found = on(device, family, unit_positions, rules=rules), list[EngineOutput]()
    for turn in range(turns):
        found.append(
            engine.generate(
                random_prompts(5 + turn, 4),
                settings(7, **options),
                Request(seed=turn, logprobs=logprobs, match_border=match_border),
                past=found[-1].state if found else None,
            )
        )
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rules": False},
        {"unit_positions": "preserved", "turns": 3},
        {"family": "gpt2", "turns": 3, "match_border": True},
        {"family": "gpt-neo"},
        {"family": "gpt-neox", **SAMPLED, "num_return_sequences": 2},
        {"family": "qwen2", **PROCESSED},
        {**SAMPLED, **PROCESSED, "min_p": 0.01},
    ],
    ids=lambda options: "+".join(options) or "greedy",
)
def test_generated_ids_and_merges_equal_those_of_the_cpu(options: dict[str, Any]) -> None:
    expected = answers("cpu", logprobs=3, **options)
    with second_device():
        found = answers(DEVICE, logprobs=3, **options)
    for ours, theirs in zip(found, expected, strict=True):
        for row, wanted in zip(ours.rows, theirs.rows, strict=True):
            assert row.ids == wanted.ids
            assert row.generated_spans == wanted.generated_spans
            assert row.cache_lengths == wanted.cache_lengths
            assert row.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_trajectories_equal_those_of_the_cpu(
    tiny_model: Callable[[str, int], PreTrainedModel],
) -> None:
    options = GeneratedCorpus(
        questions=({"kind": "text", "paths": ["questions.txt"]},), model="tiny",
        max_question_tokens=9, trajectories=2, top_p=0.8, temperature=1.1, max_tokens=12,
        batch_size=2,
    )  # fmt: skip
    prompts = [[3, 4, 5], [8], [9, 10]]
    expected = sample_trajectories(
        wrap_backbone(tiny_model("llama", 0), None), prompts, options, seed=3
    )
    with second_device():
        backbone = wrap_backbone(tiny_model("llama", 0), None)
        moved(backbone.model)
        assert sample_trajectories(backbone, prompts, options, seed=3) == expected


TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w11 w1 w2 w12 w1 w2"
CALLS: dict[str, Callable[[UMIM], Any]] = {
    "generate": lambda model: model.generate([TEXT, "w9 w1 w2"], max_new_tokens=9).text,
    "sample": lambda model: (
        model.generate(TEXT, max_new_tokens=9, do_sample=True, top_p=0.9, seed=1, n=2).text
    ),
    "stream": lambda model: list(model.stream(TEXT, max_new_tokens=9)),
    "compress": lambda model: model.compress(TEXT),
    "perplexity": lambda model: model.perplexity([TEXT, "w1 w2 w3"]),
    "base perplexity": lambda model: model.perplexity(TEXT, merge="none"),
    "score": lambda model: model.score([TEXT, "w1 w2"], [["w3", "w1 w2 w5"], ["w4"]])[0],
}


@pytest.fixture(scope="module")
def moved_umim(tiny_checkpoint: Path) -> UMIM:
    with second_device():
        return UMIM.from_pretrained(tiny_checkpoint, device=DEVICE, dtype="float32")


@pytest.mark.parametrize("call", list(CALLS))
def test_a_loaded_model_does_what_it_does_on_the_cpu(
    call: str, tiny_umim: UMIM, moved_umim: UMIM
) -> None:
    expected = CALLS[call](tiny_umim)
    with second_device():
        found = CALLS[call](moved_umim)
    if call in ("perplexity", "base perplexity", "score"):
        expected = pytest.approx(expected, rel=1e-5)
    assert found == expected


def refused() -> dict[str, Callable[[], object]]:
    ours, theirs = torch.arange(3.0, device=DEVICE), torch.arange(3.0)
    return {
        "a sum of two devices": lambda: ours + theirs,
        "a device number with a CPU tensor": lambda: ours[0] + theirs,
        "a device number into a CPU number": lambda: torch.tensor(1.0).add_(ours[0]),
        "device indices into a CPU tensor": lambda: theirs[torch.tensor([1], device=DEVICE)],
        "CPU values by index": lambda: ours.index_put((torch.tensor([0, 1]),), theirs[:2]),
        "CPU values by mask": lambda: ours.masked_scatter(ours > 0, theirs),
        "CPU ids into a device table": lambda: torch.nn.functional.embedding(
            torch.tensor([0]), ours[:, None]
        ),
        "a CPU number among device tensors": lambda: torch.stack([ours[0], torch.tensor(1.0)]),
        "a generator of the CPU": lambda: ours.uniform_(generator=torch.Generator()),
        "numpy": lambda: ours.numpy(),
        "an array": lambda: np.asarray(ours),
    }


def test_what_cuda_refuses_is_refused() -> None:
    with second_device():
        allowed = []
        for name, act in refused().items():
            try:
                act()
            except (RuntimeError, TypeError):
                continue
            allowed.append(name)
    assert allowed == []
