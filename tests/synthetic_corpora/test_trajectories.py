"""Sampled trajectories against probabilities and greedy choices computed one forward at a time."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from support.tiny_models import tiny_model
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.corpus import GeneratedCorpus
from umim_core.errors import GenerationError
from umim_core.synthetic_corpora.trajectories import Trajectory, sample_trajectories

EOS = 0  # of the tiny models
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11], [12, 13], [14, 15, 16, 17]]
OPTIONS = GeneratedCorpus(
    questions=({"kind": "text", "paths": ["questions.txt"]},), model="tiny", max_question_tokens=9,
    trajectories=3, top_p=0.7, temperature=1.0, max_tokens=20, batch_size=2,
)  # fmt: skip


def changed(**fields: float) -> GeneratedCorpus:
    """Return other options than the usual ones."""
    return OPTIONS.model_copy(update=fields)


GREEDY = changed(top_p=1e-6)


def greedy(backbone: Backbone, prompt: list[int], max_tokens: int) -> Trajectory:
    ids = list(prompt)
    while len(ids) < max_tokens:
        chosen = int(backbone.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if chosen == EOS:
            return Trajectory(ids[len(prompt) :], "eos")
        ids.append(chosen)
    return Trajectory(ids[len(prompt) :], "length")


def test_a_tiny_nucleus_gives_the_greedy_continuation(tiny_backbone: Backbone) -> None:
    found = sample_trajectories(tiny_backbone, PROMPTS, GREEDY, seed=0)
    assert found == [[greedy(tiny_backbone, prompt, 20)] * 3 for prompt in PROMPTS]


def test_tokens_are_drawn_from_the_nucleus_by_their_probability(tiny_llama: Backbone) -> None:
    draws = 1000
    options = changed(trajectories=draws, temperature=1.5, max_tokens=4)
    (answers,) = sample_trajectories(tiny_llama, [[3, 4, 5]], options, seed=0)
    logits = tiny_llama.model(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1]
    probabilities = torch.softmax(logits / 1.5, -1).tolist()
    nucleus: dict[int, float] = {}
    for token in sorted(range(32), key=lambda i: -probabilities[i]):
        if sum(nucleus.values()) >= 0.7:
            break
        nucleus[token] = probabilities[token]
    drawn = Counter(answer.ids[0] if answer.ids else EOS for answer in answers)
    assert len(nucleus) > 4
    assert set(drawn) == set(nucleus)
    for token, mass in nucleus.items():
        p = mass / sum(nucleus.values())
        assert abs(drawn[token] / draws - p) < 5 * (p * (1 - p) / draws) ** 0.5


def test_the_seed_decides_whatever_was_drawn_before(tiny_llama: Backbone) -> None:
    torch.manual_seed(1)
    first = sample_trajectories(tiny_llama, PROMPTS, OPTIONS, seed=5)
    torch.manual_seed(2)
    assert sample_trajectories(tiny_llama, PROMPTS, OPTIONS, seed=5) == first
    assert sample_trajectories(tiny_llama, PROMPTS, OPTIONS, seed=6) != first
    assert sample_trajectories(tiny_llama, PROMPTS, OPTIONS, seed=5, first=7) != first


def test_each_row_ends_at_its_own_end_of_text_or_its_own_limit(tiny_backbone: Backbone) -> None:
    options = changed(trajectories=40, temperature=1.5, top_p=1.0, batch_size=5)
    found = sample_trajectories(tiny_backbone, PROMPTS, options, seed=0)
    ended = Counter(answer.ended for answers in found for answer in answers)
    assert min(ended["eos"], ended["length"]) > 10
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for answer in answers:
            assert EOS not in answer.ids
            total = len(prompt) + len(answer.ids)
            assert total == 20 if answer.ended == "length" else total < 20


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 6e4), (torch.float32, float("nan"))])
def test_logits_that_are_not_finite_are_refused(dtype: torch.dtype, scale: float) -> None:
    model = tiny_model().to(dtype)
    backbone = wrap_backbone(model, None)
    with torch.no_grad():
        model.get_output_embeddings().weight *= scale
        assert not model(input_ids=torch.tensor(PROMPTS[:1])).logits.isfinite().all()
    with pytest.raises(GenerationError, match=r"logits must be finite; got .* Use bfloat16 or"):
        sample_trajectories(backbone, PROMPTS, OPTIONS, seed=0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 20, "a prompt must have 1 to 19 tokens; got 0"),
        ([1] * 20, 20, "a prompt must have 1 to 19 tokens; got 20"),
        ([1], 65, "max_tokens must be at most 64, the positions of tiny-llama; got 65"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_llama: Backbone, prompt: list[int], max_tokens: int, message: str
) -> None:
    options = changed(max_tokens=max_tokens)
    with pytest.raises(GenerationError, match=message):
        sample_trajectories(tiny_llama, [prompt], options, seed=0)
