"""Checkpoint and backbone that ``--model_args`` name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

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
