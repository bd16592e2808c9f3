"""Checkpoint and backbone that ``--model_args`` name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

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
