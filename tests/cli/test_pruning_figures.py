"""Lines of ``umim prune``: a token reduction that is far above what was asked is pointed out."""

from __future__ import annotations

import pytest

from umim_core.cli.pruning_figures import Pruning


@pytest.mark.parametrize(("reduction", "said"), [(0.1, False), (0.25, True)])
def test_rules_of_equal_price_may_exceed_the_target_and_a_line_says_so(
    reduction: float, said: bool
) -> None:
    figures = Pruning(
        checkpoint="less/checkpoint",
        damage="less/damage",
        name="pruned/less",
        rules_before=9,
        rules=9,
        rules_met=1,
        measured_tokens=99,
        heldout_tokens=99,
        token_reduction_before=0.3,
        token_reduction=0.3,
        max_damage=0.5,
        damage_dropped=0.0,
        savings_dropped=0.0,
        protect=(),
        decode_target=0.095,
        decode_max_damage=0.5,
        decode_rules=8,
        decode_token_reduction=reduction,
    )
    [line] = [line for line in figures.lines() if line.startswith("generated tokens merge by 8")]
    assert ("more than the 9.50% asked for" in line) == said
