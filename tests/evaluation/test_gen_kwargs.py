"""Generation kwargs of lm-eval's tasks: what has no effect is left out, the impossible refused."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from support.generation_contract import Case, Models
from umim_core.errors import GenerationError


def test_kwargs_without_effect_are_reported_once_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = Models(Case(options={"early_stopping": "never", "use_cache": True, "max_length": 30}))
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level(logging.WARNING, "lm_eval"):
        texts = models.ours("all", 1).generate_until(models.requests())
    assert all(texts)
    lines = [line for line in caplog.messages if line.startswith("umim: ")]
    assert len(lines) == len(set(lines))
    for name in ("early_stopping", "use_cache", "max_length"):
        assert any(name in line for line in lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"do_sample": True, "temperature": 0.0}, "out of range"),
        ({"decode_max_damage": "most"}, "decode_max_damage must be a number of nats"),
        ({"top_p": 7.0, "do_sample": True, "temperature": 1.0}, "out of range"),
    ],
)
def test_kwargs_that_cannot_be_honoured_are_refused_by_name(
    options: dict[str, object], named: str
) -> None:
    models = Models(Case(options=options))
    with pytest.raises(GenerationError, match=named):
        models.ours("all", 1).generate_until(models.requests())
