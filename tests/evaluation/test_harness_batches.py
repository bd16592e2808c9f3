"""Batch size ``auto`` of the lm-eval model, and digests and bounds in its result files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance

from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.harness import UmimLM

MAX_LENGTH = 48  # of the backbone
PAIRS = [("the cat sat on the", " mat"), ("the cat sat on the", " dog"), ("by the sea", " the cat")]
REQUESTS = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]


def test_result_files_name_backbone_module_and_rules_by_digest(
    checkpoint_path: Path,
) -> None:
    made = Checkpoint.load(checkpoint_path)
    info = UmimLM(str(checkpoint_path), "prompt", device="cpu").get_model_info()["umim"]
    assert info["backbone_fingerprint"] == made.config.backbone_fingerprint
    assert info["module_digest"] == made.module.digest()
    assert info["rules_digest"] == made.rules.digest
    base = UmimLM(str(checkpoint_path), "none", device="cpu").get_model_info()["umim"]
    assert (base["module_digest"], base["rules_digest"]) == (None, None)


def test_result_files_carry_the_bound_that_generated_tokens_merged_under(
    checkpoint_path: Path, backbone_path: Path
) -> None:
    made, backbone = Checkpoint.load(checkpoint_path), load_backbone(str(backbone_path))
    rules = replace(made.rules, prices=np.ones(len(made.rules), np.float32))
    bounded = made.with_contents(made.module, rules).decoding_under(0.4)

    def recorded(merge: str, *asked: dict[str, object]) -> object:
        model = UmimLM(bounded, merge, backbone)
        for number, options in enumerate(asked):
            settings = {"until": ["\n"], "max_gen_toks": 2, "do_sample": False, **options}
            model.generate_until([Instance("generate_until", {}, ("the cat", settings), number)])
        return model.get_model_info()["umim"]["decode_max_damage"]

    cheaper: dict[str, object] = {"decode_max_damage": 0.2}
    assert [recorded("all", {}), recorded("all", cheaper)] == [0.4, 0.2]
    assert recorded("all", {}, cheaper, {"decode_max_damage": math.inf}) == [0.4, 0.2, None]
    assert [recorded("prompt", {}), recorded("none", {}), recorded("all")] == [None, None, None]


@pytest.mark.parametrize("merge", ["none", "prompt", "all"])
def test_an_automatic_batch_on_a_cpu_counts_tokens_and_tries_nothing(
    checkpoint_path: Path, merge: str
) -> None:
    model = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size="auto")
    assert model._detect_batch_size() == 2048 // MAX_LENGTH
    assert model._detect_batch_size([(None, [1] * 5, [2])]) == model.max_batch_size == 64
    forwards: list[int] = []
    hook = model.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    found = model.loglikelihood(REQUESTS)
    hook.remove()
    one = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=1)
    assert len(forwards) == 1
    assert [x for x, _ in found] == pytest.approx(
        [x for x, _ in one.loglikelihood(REQUESTS)], abs=1e-4
    )
