"""Settings of hidden-state terms in a distillation's loss: layers, distance, rows, weight.

========  =============  =======================================================================
policy    values         meaning
========  =============  =======================================================================
layers    ``last``       the states that the head reads, after the final norm
          ``all``        what every block gives, the mean over the blocks
distance  ``smooth_l1``  e^2 / 2 below 1 and |e| - 1/2 above, the mean over the hidden size
          ``mse``        e^2, the mean over the hidden size
rows      ``attending``  aligned rows of raw tokens: they see surrogates by attention alone
          ``aligned``    all aligned rows, those of the surrogates themselves too
========  =============  =======================================================================

e is the difference of student and teacher divided by the teacher's standard deviation.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from umim_core.config.model_base import LATER, Model, PositiveFloat, StableDump

Layers = Literal["last", "all"]
Distance = Literal["smooth_l1", "mse"]
TermRows = Literal["attending", "aligned"]
_Training = TypeVar("_Training", bound=Model)


class HiddenTerm(Model):
    """One term: its layers, distance, rows and weight."""

    layers: Layers = Field(description="Whose states are compared: `last` layer, or `all`.")
    weight: PositiveFloat = Field(1.0, description="Factor in the loss, next to cross-entropy.")
    distance: Distance = Field(
        "smooth_l1", description="Of states divided by the teacher's standard deviation."
    )
    rows: TermRows = Field(
        "attending", description="Aligned rows of raw tokens, which attend to units; or all."
    )

    @property
    def name(self) -> str:
        """Name of its metrics, after ``train_`` and ``valid_``."""
        return f"hidden_{self.layers}"

    @property
    def words(self) -> str:
        """The term in words, for labels; weight 1, smooth L1 and attending rows go unsaid."""
        parts = (
            f"hidden states of {'all layers' if self.layers == 'all' else 'the last layer'}",
            "" if self.weight == 1.0 else f"weight {self.weight:g}",
            "" if self.distance == "smooth_l1" else self.distance,
            "" if self.rows == "attending" else f"{self.rows} rows",
        )
        return " ".join(filter(None, parts))


def _different(terms: tuple[HiddenTerm, ...]) -> tuple[HiddenTerm, ...]:
    if len({term.name for term in terms}) != len(terms):
        raise ValueError("hidden_terms must have different layers: at most one last and one all")
    return terms


HiddenTerms = Annotated[tuple[HiddenTerm, ...], AfterValidator(_different)]


class OwnTerms(StableDump):
    """Hidden-state terms that a cell of a recipe may have for itself."""

    hidden_terms: Annotated[HiddenTerms | None, LATER] = Field(
        None, description="Hidden-state terms of this cell's distillation; null: those of distill."
    )

    def distillation(self, config: _Training) -> _Training:
        """Return the optimisation of a cell's distillation: the recipe's, with the cell's terms."""
        if self.hidden_terms is None:
            return config
        return config.model_copy(update={"hidden_terms": self.hidden_terms})

    def term_words(self) -> tuple[str, ...]:
        """Return the cell's own terms in words, for labels."""
        if self.hidden_terms is None:
            return ()
        return tuple(term.words for term in self.hidden_terms) or ("no hidden states",)
