from __future__ import annotations

import re

import pytest

from support.processes import ROOT, need_model


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    need_model()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102  # our own README
    shown = capsys.readouterr().out
    (promised,) = re.findall(r'answers, "(.*?)"', " ".join(text.split()))
    assert promised in shown
    assert re.search(r"\([12]\d% of the prompt's tokens saved\)", shown)
    assert re.search(r"\[ ?\w+ \w+", shown)  # a merged span, where there are no colours
