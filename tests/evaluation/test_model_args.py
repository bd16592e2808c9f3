"""Checkpoint and backbone that ``--model_args`` name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance

from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError
from umim_core.evaluation.harness import UmimLM


def test_another_backbone_is_taken_for_a_reason(
    checkpoint_path: Path,
    tmp_path: Path,
    other_backbone: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = str(other_backbone(tmp_path / "other"))
    reason = "it is quantised"
    UmimLM(str(checkpoint_path), backbone=other, device="cpu", allow_backbone_mismatch=reason)
    assert f"not the checkpoint's own backbone: {reason}" in caplog.text
    with pytest.raises(ConfigError, match="must not come with merge=none"):
        UmimLM(str(checkpoint_path), "none", allow_backbone_mismatch=reason)


@pytest.mark.parametrize(
    ("merge", "raw_tail", "message"),
    [("prompt", -1, "raw_tail must be an integer"), ("none", 2, "raw_tail needs a prompt")],
)
def test_a_raw_tail_is_refused_before_anything_is_loaded(
    merge: str, raw_tail: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        UmimLM("no-such-checkpoint", merge, raw_tail=raw_tail)


def test_the_end_of_a_context_may_stay_raw(checkpoint_path: Path) -> None:
    pairs = [("the cat sat on the", " mat"), ("by the sea the old cat ", "house")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    models = {
        raw_tail: UmimLM(str(checkpoint_path), raw_tail=raw_tail, device="cpu")
        for raw_tail in (1, 99)
    }
    scores = {tail: model.loglikelihood(requests) for tail, model in models.items()}
    base = UmimLM(str(checkpoint_path), "none", device="cpu").loglikelihood(requests)
    assert [score for score, _ in scores[99]] == pytest.approx([s for s, _ in base], abs=1e-4)
    assert scores[1] != scores[99]
    assert models[99].context_token_reduction == 0.0 < models[1].context_token_reduction
    assert models[99].get_model_info()["umim"]["raw_tail"] == 99


def test_the_base_model_reads_no_weights_of_a_checkpoint(
    checkpoint_path: Path, backbone_path: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint_path / "config.json", tmp_path)
    for options in ({"checkpoint": str(tmp_path)}, {"checkpoint": "no", "backbone": backbone_path}):
        assert UmimLM(merge="none", device="cpu", **options).scorer is None


def test_a_loaded_checkpoint_is_not_reported_by_a_name(
    checkpoint_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lm_eval.umim")
    UmimLM(Checkpoint.load(checkpoint_path), device="cpu")
    assert "umim: backbone" in caplog.text
    assert "umim: checkpoint" not in caplog.text


def test_tokens_may_be_protected_from_merging(checkpoint_path: Path) -> None:
    whole, cut = (UmimLM(str(checkpoint_path), protect=given) for given in (None, "c"))
    [all_rules, left] = [model.get_model_info()["umim"]["rules_digest"] for model in (whole, cut)]
    assert left != all_rules
    with pytest.raises(ConfigError, match="protect keeps tokens from being merged"):
        UmimLM(str(checkpoint_path), "none", protect="c")
    with pytest.raises(ConfigError, match="protect is of the checkpoint's own rules"):
        UmimLM(str(checkpoint_path), protect="c", method="truncation")
