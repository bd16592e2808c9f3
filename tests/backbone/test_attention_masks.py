from __future__ import annotations

from threading import Event, Thread

import numpy as np
import pytest
import torch

from support.engine_matrix import VOCAB as RULE_IDS
from support.engine_matrix import from_scratch, module_for, random_prompts, random_rules, settings
from support.family_configs import EXACT, VOCAB, random_model
from support.tiny_models import random_backbone
from umim_core.backbone.attention_masks import attention_switched
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel

WINDOW = 6
FAMILIES = ["mistral", "gemma3_text", "gpt_oss", "gpt_neo", "olmo3", "exaone4", "starcoder2"]
PROMPT = np.concatenate(random_prompts(5, 3))


def windowed(family: str) -> Backbone:
    """A family with a window that the texts below outgrow."""

    def config() -> object:
        made = EXACT[family]()
        name = "window_size" if family == "gpt_neo" else "sliding_window"
        setattr(made, name, WINDOW)
        return made

    return wrap_backbone(random_model(config, torch.float64), None)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_one_row_goes_beyond_the_window_exactly(family: str) -> None:
    backbone = windowed(family)
    module, matcher = module_for(backbone), random_rules(3, infix_free=False)
    engine = Engine(MergedModel(backbone, module, matcher, "compact"))
    parts = [PROMPT.tolist()]
    errors, lengths = [], []

    def compare(forward: Forward) -> None:
        expected, units = from_scratch(
            backbone, module, matcher, [*parts, list(forward.generated[0])]
        )
        assert forward.lengths[0] == units
        errors.append(float((forward.logits[0] - expected).abs().max()))
        lengths.append(units)

    dense = settings(
        8,
        observer=compare,
        seed=1,
        do_sample=True,
        temperature=3.0,
        suppress_tokens=list(range(RULE_IDS, VOCAB)),
    )
    first = engine.generate([PROMPT], dense)
    assert first.rows[0].prompt_spans
    assert first.rows[0].gen_kv_reduction > 0
    # The next turn is read in one piece on top of the cache.
    parts += [first.rows[0].ids[:-1], first.rows[0].ids[-1:], PROMPT[:9].tolist()]
    engine.generate([PROMPT[:9]], dense, past=first.state)
    assert max(errors) < 1e-5
    assert min(lengths) > WINDOW


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_plain_texts_and_single_continuations_are_the_models_own(family: str) -> None:
    backbone = windowed(family)
    rows = [PROMPT, PROMPT[:13]]
    for row, ours in zip(
        rows, token_log_probs(rows, MergedModel.without_merging(backbone)), strict=True
    ):
        logits = backbone.model(input_ids=torch.from_numpy(row)[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(row[1:])[:, None])[:, 0]
        assert torch.allclose(ours, expected, rtol=0, atol=1e-5)
    scored = score_continuations(
        [row[:-3] for row in rows],
        [[row[-3:]] for row in rows],
        MergedModel.without_merging(backbone),
    )
    for row, [score] in zip(rows, scored, strict=True):
        logits = backbone.model(input_ids=torch.from_numpy(row)[None]).logits[0, -4:-1]
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(row[-3:])[:, None])[:, 0]
        assert torch.allclose(score.log_probs, expected, rtol=0, atol=1e-5)


def test_a_thread_that_switches_attention_waits_for_one_that_has() -> None:
    """It would end the other's switch within a forward: 16 of 60 losses were wrong."""
    model = random_backbone("llama").model
    entered, seen = Event(), []

    def switch() -> None:
        with attention_switched(model, "eager"):
            seen.append(model.config._attn_implementation)
            entered.set()

    with attention_switched(model, "eager"), attention_switched(model, "sdpa"):  # one thread may
        other = Thread(target=switch)
        other.start()
        assert not entered.wait(0.2)
        assert model.config._attn_implementation == "sdpa"
    other.join()
    assert seen == ["eager"] and model.config._attn_implementation == "sdpa"
