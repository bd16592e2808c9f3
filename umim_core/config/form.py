"""Forms of the merge module, as recipes, checkpoints and modules name them.

==============  =============  ================================================================
policy          values         meaning
==============  =============  ================================================================
kind            ``attention``  tokens are projected and pooled by attention (the paper's form)
                ``linear``     embeddings side by side, one linear layer
depth           1              each token is projected on its own (the paper's form)
                3              two layers of self-attention over the span come first
positions       ``none``       no sign of a token's offset in its span (the paper's form)
                ``learned``    one learned vector per offset, added to the embeddings
unit_positions  ``compact``    units have the positions 0, 1, 2, ... (the paper's form)
                ``preserved``  a unit has the position of its last raw token
==============  =============  ================================================================

The first value of each is the default. A linear module has a weight per offset, hence sees the
order without positions; it has one layer. ``unit_positions`` is no part of the module itself: it
says which positions the backbone gives to units while the module is trained, and ever after::

    ids        x1 x2 x3 x4 x5        units  [x1] [x2 x3] [x4] [x5]
    raw         0  1  2  3  4        compact  0     1      2    3      preserved  0  2  3  4
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator

from umim_core.config.model_base import LATER, StableDump
from umim_core.errors import ConfigError

Positions = Literal["none", "learned"]
Depth = Literal[1, 3]
Kind = Literal["attention", "linear"]
UnitPositions = Literal["compact", "preserved"]
_POLICIES: Final = {"positions": Positions, "depth": Depth, "kind": Kind}


def check_form(positions: str, depth: int, kind: str) -> None:
    """Refuse a form that does not exist.

    Args:
        positions: ``none`` or ``learned``.
        depth: 1 or 3.
        kind: ``attention`` or ``linear``; linear takes neither positions nor more depth.

    Raises:
        ConfigError: If a policy is unknown or they do not go together.
    """
    values = {"positions": positions, "depth": depth, "kind": kind}
    for name, value in values.items():
        if value not in get_args(_POLICIES[name]):
            known = " or ".join(map(repr, get_args(_POLICIES[name])))
            raise ConfigError(f"{name} must be {known}", value, "Choose one.")
    if kind == "linear" and (positions, depth) != ("none", 1):
        raise ConfigError(
            "a linear merge module must have positions 'none' and depth 1",
            f"positions {positions!r}, depth {depth}",
            "It sees the order by itself; leave both out.",
        )


def deviations(
    positions: str, depth: int, kind: str, unit_positions: str = "compact"
) -> tuple[str, ...]:
    """Return in words where a form deviates from the paper's, for labels; empty for the paper's."""
    words = (
        "" if kind == "attention" else kind,
        "" if depth == 1 else f"depth {depth}",
        "" if positions == "none" else f"{positions} positions",
        "" if unit_positions == "compact" else f"{unit_positions} unit positions",
    )
    return tuple(filter(None, words))


class ModuleForm(StableDump):
    """The form of a merge module and of its use, as fields of a configuration.

    All but ``positions`` are dumped only where they deviate from the paper's form: what was written
    before they existed keeps its bytes, its digest and its stage key.
    """

    model_config = ConfigDict(frozen=True)

    positions: Positions = Field("none", description="What the module sees of a token's offset.")
    depth: Annotated[Depth, LATER] = Field(
        1, description="Layers over a span before it is pooled, projection too."
    )
    kind: Annotated[Kind, LATER] = Field(
        "attention", description="How the module makes one embedding of a span."
    )
    unit_positions: Annotated[UnitPositions, LATER] = Field(
        "compact", description="Which positions units have in the backbone."
    )

    @model_validator(mode="after")
    def _exists(self) -> Self:
        try:
            check_form(self.positions, self.depth, self.kind)
        except ConfigError as error:
            raise ValueError(error.rule) from error
        return self

    def form(self) -> dict[str, object]:
        """Return the policies alone, as a stage's key holds them."""
        return self.model_dump(include=set(ModuleForm.model_fields))

    @property
    def permutation_invariant(self) -> bool:
        """Whether permuted spans share a surrogate, whatever the weights, and repeated ones too."""
        return self.kind == "attention" and self.positions == "none"
