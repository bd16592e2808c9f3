"""One-line descriptions (``repr``) of the main objects."""

from __future__ import annotations

from umim_core import UMIM


def test_the_main_objects_say_what_they_are_in_a_line(tiny_umim: UMIM) -> None:
    rules = repr(tiny_umim.rules)
    assert rules.startswith("RuleSet(3 rules: 1 of 2, 1 of 3, 1 of 4 tokens; explicit, tau ")
    backbone = repr(tiny_umim.backbone)
    assert backbone.endswith("LlamaForCausalLM, d 16, V 32, torch.float32 on cpu)")
    assert repr(tiny_umim) == f"UMIM({backbone}, {{'positions': 'none'}}, {rules})"
    assert repr(tiny_umim.checkpoint).endswith(f"{{'positions': 'none'}}, {rules})")
