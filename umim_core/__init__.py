"""UMIM: merge frequent token spans into single input embeddings of a frozen language model.

``from umim_core import UMIM`` is the public entry point. Names are resolved on first use, so that
``import umim_core`` alone loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umim_core.backbone.backbone import wrap_backbone as wrap_backbone
    from umim_core.checkpoint.checkpoint import Checkpoint as Checkpoint
    from umim_core.config.rule_options import RuleOptions as RuleOptions
    from umim_core.errors import UmimError as UmimError
    from umim_core.merging.module import MergeModule as MergeModule
    from umim_core.mining.mine import mine_rules as mine_rules
    from umim_core.model.umim import UMIM as UMIM
    from umim_core.rules.matcher import Matcher as Matcher
    from umim_core.rules.ruleset import RuleSet as RuleSet

__version__ = "0.1.0"

_EXPORTS = {
    "UMIM": "umim_core.model.umim",
    "Checkpoint": "umim_core.checkpoint.checkpoint",
    "Matcher": "umim_core.rules.matcher",
    "MergeModule": "umim_core.merging.module",
    "RuleOptions": "umim_core.config.rule_options",
    "RuleSet": "umim_core.rules.ruleset",
    "UmimError": "umim_core.errors",
    "mine_rules": "umim_core.mining.mine",
    "wrap_backbone": "umim_core.backbone.backbone",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
