"""Identity of the model behind a result: backbone, module and rules by digest, and how it reads."""

from __future__ import annotations

from umim_core.baselines.reduction import TargetReduction
from umim_core.config.form import Merge
from umim_core.merging.compressed import Compressed
from umim_core.store.artifacts import sha256_bytes

Identity = dict[str, str | int | float | None]


def answer_identity(
    compressed: Compressed, merge: Merge, method: str | None, target: TargetReduction | None
) -> Identity:
    """Return what decides the answers of a model, for result files and as the key of a cache.

    Args:
        compressed: Backbone, module and rules.
        merge: What is merged; with ``none``, module and rules are None.
        method: The baseline in the merge module's place; None for the module.
        target: The baseline's token reduction; None for that of the rules, which is not named.
    """
    backbone = compressed.backbone
    rules = None if merge == "none" else compressed.require_matcher().rules
    prices = None if rules is None else rules.prices
    return {
        "backbone": backbone.name,
        "backbone_fingerprint": backbone.fingerprint,
        "tokenizer_fingerprint": backbone.tokenizer_fingerprint,
        "module_digest": None if rules is None else compressed.require_module().digest(),
        "rules_digest": None if rules is None else rules.digest,
        "prices_digest": None if prices is None else sha256_bytes(prices.tobytes()),
        "dtype": str(backbone.dtype),
        "merge": merge,
        "unit_positions": None if rules is None else compressed.unit_positions,
        "raw_tail": compressed.raw_tail,
        "method": method or "umim",
        **({} if target is None else {"target_tr": target.target}),
    }


def named_method(name: str | None, own: str | None) -> str | None:
    """Return a baseline's name, with the model of its own (name@commit) that it chooses by."""
    return name if own is None else f"{name} ({own})"
