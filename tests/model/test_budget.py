"""One dial: ``budget`` or ``target_tr`` choose rules by price, wherever a model is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError, RuleSetError
from umim_core.model.compression import compress_text
from umim_core.rules.pruning import recording_reductions

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge
PRICES = (0.05, 0.2, 0.8)


@pytest.fixture
def priced(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    made = Checkpoint.load(tiny_checkpoint)
    rules = replace(made.rules, prices=np.array(PRICES, np.float32))
    ids = np.array([int(word[1:]) for word in TEXT.split()])
    rules = recording_reductions(rules, (ids, np.array([0, len(ids)])))
    made.with_contents(made.module, rules).save(tmp_path / "priced")
    return tmp_path / "priced"


@pytest.mark.parametrize(
    ("own", "budget", "units"),
    [(None, 0.1, 9), (None, 0.5, 7), (0.1, None, 9), (0.1, 0.5, 7), (0.1, math.inf, 4)],
)
def test_dearer_rules_go(
    priced: Path, tmp_path: Path, own: float | None, budget: float | None, units: int
) -> None:
    made = Checkpoint.load(priced)
    replace(made, config=made.config.model_copy(update={"budget": own})).save(tmp_path / "own")
    umim = UMIM.from_pretrained(tmp_path / "own", budget=budget)
    assert umim.checkpoint.config.budget is None
    if budget is None:
        assert len(compress_text(TEXT, str(tmp_path / "own")).units) == units
    assert len(umim.compress(TEXT).units) == units
    umim.save_pretrained(tmp_path / "again")
    assert Checkpoint.load(tmp_path / "again").rules.digest == umim.rules.digest


@pytest.mark.parametrize(
    ("target", "units"), [(0.05, 9), (0.1, 9), (0.2, 7), (0.3, 7), (0.31, 4), (0.6, 4)]
)
def test_the_cheapest_rules_stay_that_reach_a_reduction(
    priced: Path, tmp_path: Path, target: float, units: int
) -> None:
    umim = UMIM.from_pretrained(priced, target_tr=target)
    assert len(umim.compress(TEXT).units) == units <= math.ceil(10 * (1 - target))
    umim.save_pretrained(tmp_path / "again")
    if len(umim.rules) < len(PRICES):  # what is left saves another share of each price
        with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
            UMIM.from_pretrained(tmp_path / "again", target_tr=target)


def test_a_reduction_that_cannot_be_reached_or_told_is_refused(
    priced: Path, tiny_checkpoint: Path
) -> None:
    with pytest.raises(RuleSetError, match=r"a token reduction of 0\.7; got 0\.6 with all 3"):
        UMIM.from_pretrained(priced, target_tr=0.7)
    with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
        UMIM.from_pretrained(tiny_checkpoint, target_tr=0.1)
    made = Checkpoint.load(priced)
    rules = replace(made.rules, origin=Checkpoint.load(tiny_checkpoint).rules.origin)
    with pytest.raises(RuleSetError, match="recorded with their prices; got 3 rules without it"):
        UMIM.from_pretrained(made.with_contents(made.module, rules), target_tr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"target_tr": t}, "reduction must lie above 0") for t in (0, 0.8, math.nan, "0.1")),
        *(({"budget": b}, "must be a number of nats") for b in (-0.1, math.nan, "0.1", True)),
        ({"budget": 0.1, "target_tr": 0.1}, "rules are chosen by a budget or by target_tr"),
    ],
)
def test_what_chooses_no_rules_is_refused_first(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        UMIM.from_pretrained("no-such-checkpoint", **options)


def test_a_budget_needs_prices_and_a_rule(priced: Path, tiny_checkpoint: Path) -> None:
    assert len(UMIM.from_pretrained(priced, budget=0.5, protect="w1$").rules) == 1
    with pytest.raises(RuleSetError, match=r"the cheapest of 3 rules costs 0\.05"):
        UMIM.from_pretrained(priced, budget=0.01)
    with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
        UMIM.from_pretrained(tiny_checkpoint, budget=0.1)


def test_lm_eval_takes_it(priced: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")
    from umim_core.evaluation.harness import UmimLM

    for name, value in {"budget": 0.5, "target_tr": 0.1}.items():
        model = UmimLM.create_from_arg_string(f"checkpoint={priced},{name}={value}")
        rules = UMIM.from_pretrained(priced, **{name: value}).rules
        assert model.get_model_info()["umim"]["rules_digest"] == rules.digest
    with pytest.raises(ConfigError, match="a budget must be a number of nats"):
        UmimLM("no-such-checkpoint", budget=-1.0)
    for said in ({"budget": 0.1}, {"merge": "none"}):
        with pytest.raises(ConfigError, match="target_tr"):
            UmimLM("no-such-checkpoint", target_tr=0.1, **said)
