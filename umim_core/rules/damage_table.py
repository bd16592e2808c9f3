"""Damage table: the divergence from the base model that each rule cost on a text.

``evaluation.rule_damage`` measures it, ``rules.pruning`` cuts rule sets by it. A directory::

    rules/             the rules that were measured, as a rule directory
    occurrences.npy    states that end in a merged unit of each rule [R] (int64)
    merges.npy         units of the whole text that are the rule [R] (int64)
    kl.npy             sum of the divergence that goes to the rule, nats [R] (float64)
    manifest.json      kind "damage", text, model, digests

R rules, sorted by n, then ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from umim_core.errors import ArtifactError, require
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import described, read_manifest, write_manifest
from umim_core.store.publication import publish_directory
from umim_core.text.token_ids import Ints

DAMAGE_KIND: Final = "damage"
DAMAGE_SCHEMA: Final = 1
PRIOR_OCCURRENCES: Final = 4.0
_ARRAYS: Final[dict[str, Any]] = {"occurrences": np.int64, "merges": np.int64, "kl": np.float64}
_AGAIN: Final = "Measure the rules again."

Floats = NDArray[np.float64]


class DamageOrigin(BaseModel):
    """Text and model of a measurement, as its manifest records them.

    Attributes:
        backbone_fingerprint: SHA-256 of its architecture and weights.
        module_digest: SHA-256 of the merge module's form and weights.
        text_digest: SHA-256 of the text's ids, as int32.
        tokens: Raw tokens of the text.
        rows: Rows that the text was cut into.
        window: States after a merge whose divergence goes to it, its own included.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    backbone: str
    backbone_fingerprint: str
    module_digest: str
    unit_positions: str
    text_digest: str
    tokens: int
    rows: int
    window: int


@dataclass(frozen=True)
class DamageTable:
    """Measured damage of the rules of one set; the module says what its arrays hold."""

    rules: RuleSet
    occurrences: Ints
    merges: Ints
    kl: Floats
    origin: DamageOrigin

    def __post_init__(self) -> None:
        for name, kind in _ARRAYS.items():
            column = getattr(self, name)
            rule = f"{name} of a damage table must be {len(self.rules)} numbers, one a rule"
            found = f"shape {column.shape}, {column.dtype}"
            fits = column.shape == (len(self.rules),) and column.dtype == kind
            require(fits, ArtifactError, rule, found, _AGAIN)
        possible = (self.merges >= 0) & (self.merges <= self.occurrences) & np.isfinite(self.kl)
        at = int(possible.argmin()) if len(self.rules) else 0
        rule = "a rule of a damage table must have 0 <= merges <= occurrences and a finite KL"
        row = [column[at : at + 1].tolist() for column in (self.merges, self.occurrences, self.kl)]
        require(bool(possible.all()), ArtifactError, rule, row, _AGAIN)

    @property
    def saved_tokens(self) -> Ints:
        """Tokens that each rule saved on the text [R]: those of its units, less one a unit."""
        return self.merges * (self.rules.sizes - 1)

    def mean_kl(self) -> Floats:
        """Return the divergence of one occurrence of each rule [R], estimated, in nats.

        A rule that was seen k times is no better known than k draws of a skewed quantity allow, so
        its mean is shrunk towards that of the rules of its length n, and theirs towards that of
        all, by m = 4 occurrences each::

            all       a    = sum of kl / sum of occurrences
            length n  p_n  = (kl of length n  + m a)   / (occurrences of length n  + m)
            rule r    mean = (kl of r         + m p_n) / (occurrences of r         + m)

        A rule that was never seen gets p_n.

        Source: Bühlmann, Experience Rating and Credibility (1967), with m chosen, not estimated.
        """
        seen = int(self.occurrences.sum())
        overall = float(self.kl.sum()) / seen if seen else 0.0
        means = np.empty(len(self.rules))
        for n in self.rules.orders:
            rows = self.rules.sizes == n
            prior = float(_shrunk(self.kl[rows].sum(), self.occurrences[rows].sum(), overall))
            means[rows] = _shrunk(self.kl[rows], self.occurrences[rows], prior)
        return means

    def write(self, directory: Path) -> None:
        self.rules.write(directory / "rules")
        for name in _ARRAYS:
            save_array(directory / f"{name}.npy", getattr(self, name))
        body = self.origin.model_dump()
        write_manifest(directory, kind=DAMAGE_KIND, schema=DAMAGE_SCHEMA, body=body)

    def save(self, directory: str | Path) -> None:
        publish_directory(Path(directory), self.write)

    @classmethod
    def load(cls, directory: str | Path) -> DamageTable:
        path = Path(directory)
        names = [f"{name}.npy" for name in _ARRAYS]
        manifest = read_manifest(path, kind=DAMAGE_KIND, schema=DAMAGE_SCHEMA, required=names)
        rule = f"{path}/manifest.json must describe a damage table"
        with described(rule, _AGAIN):
            origin = DamageOrigin.model_validate(manifest)
        arrays = {name: open_array(path / f"{name}.npy") for name in _ARRAYS}
        return cls(RuleSet.load(path / "rules"), **arrays, origin=origin)


def _shrunk(kl: Floats, occurrences: Ints, prior: float) -> Floats:
    return np.asarray((kl + PRIOR_OCCURRENCES * prior) / (occurrences + PRIOR_OCCURRENCES))
