from __future__ import annotations

import re
from pathlib import Path

import pytest

from umim_core.model_sources.model_cache import model_fault
from umim_core.model_sources.packaged_model import PACKAGED

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if fault := model_fault(PACKAGED["smollm2-135m-instruct"]):
        pytest.skip(str(fault))
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102  # our own README
    shown = capsys.readouterr().out
    (promised,) = re.findall(r'answers, "(.*?)"', " ".join(text.split()))
    assert promised in shown
    assert re.search(r"\([12]\d% of the prompt's tokens saved\)", shown)
    assert re.search(r"\[ ?\w+ \w+", shown)  # a merged span, where there are no colours
