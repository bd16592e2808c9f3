"""Progress bars of lm-eval, which passes a flag of its own to tqdm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance

from umim_core.evaluation.harness import UmimLM

GREEDY = {"until": ["."], "max_gen_toks": 2, "do_sample": False}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "loglikelihood": ("the cat sat", " on"),
    "loglikelihood_rolling": ("the cat sat on the mat",),
    "generate_until": ("the cat sat", GREEDY),
}


@pytest.mark.parametrize("kind", list(ARGUMENTS))
@pytest.mark.parametrize("merge", ["prompt", None])
def test_bars_are_hidden_where_tqdm_is_switched_off(
    checkpoint_path: Path,
    merge: str | None,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=1)
    requests = [Instance(kind, {}, ARGUMENTS[kind], 0)]
    capfd.readouterr()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    getattr(model, kind)(requests)
    assert "it/s" not in capfd.readouterr().err
    monkeypatch.setenv("TQDM_DISABLE", "0")
    getattr(model, kind)(requests)
    assert "it/s" in capfd.readouterr().err
