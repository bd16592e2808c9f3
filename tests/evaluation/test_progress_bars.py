"""Progress bars of lm-eval, which passes a flag of its own to tqdm."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance

from umim_core.evaluation.harness import UmimLM


@pytest.mark.parametrize("merge", ["prompt", None])
def test_bars_are_hidden_where_tqdm_is_switched_off(
    checkpoint_path: Path,
    merge: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=1)
    requests = [Instance("loglikelihood", {}, ("the cat sat", " on"), 0)]
    capfd.readouterr()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    model.loglikelihood(requests)
    assert "it/s" not in capfd.readouterr().err
    monkeypatch.setenv("TQDM_DISABLE", "0")
    model.loglikelihood(requests)
    assert "Tokenizing inputs" in capfd.readouterr().err
