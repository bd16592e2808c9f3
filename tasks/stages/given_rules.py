"""Stage ``given-rules``: rules that were mined before, as ``umim mine`` writes them."""

from __future__ import annotations

from pathlib import Path

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import Cell
from umim_core.errors import ConfigError
from umim_core.rules.collisions import collision_rate
from umim_core.rules.grams import ORDERS
from umim_core.rules.protect import check_vocabulary
from umim_core.rules.ruleset import RuleSet


def given_rules_stage(root: Path, cell: Cell) -> Artifact:
    """Take over a rule directory; the artifact holds ``rules``.

    Raises:
        ConfigError: If the cell names no rule directory.
        ArtifactError: If the directory is missing, torn or altered.
        TokenizerMismatchError: If the rules belong to another tokenizer than the cell's.
        RuleSetError: If a rule holds a special token.
    """
    if cell.rules is None:
        raise ConfigError("a cell must name its rule directory", None, "Set rules.")
    tokenizer = load_tokenizer(cell.backbone, revision=cell.revision)
    fingerprint = tokenizer_fingerprint(tokenizer)
    given = RuleSet.load(cell.rules, tokenizer_fingerprint=fingerprint)
    check_vocabulary(given, len(tokenizer), special_ids(tokenizer))
    spec = StageSpec("given-rules", 1, {"tokenizer": fingerprint}, {"rules": given.digest})

    def build(out: Path) -> Metrics:
        (out / "rules").mkdir()
        given.write(out / "rules")
        # How many n-grams the filters dropped is not known any more; the report shows every step.
        steps, found = ("raw", "overlap", "rules"), given.counts_by_order
        numbers = {f"{step}_{n}": float(found[n]) for step in steps for n in ORDERS}
        tau = {} if given.origin.tau is None else {"tau": float(given.origin.tau)}
        return {**numbers, **tau, "collision_rate": collision_rate(given)}

    return run_stage(root, spec, build)
