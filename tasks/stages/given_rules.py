"""Stage ``given-rules``: rules that were mined before, as ``umim mine`` writes them."""

from __future__ import annotations

from pathlib import Path

from tasks.data.mining_files import write_rules
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import Cell
from umim_core.errors import ConfigError
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
    rules = RuleSet.load(cell.rules, tokenizer_fingerprint=fingerprint)
    check_vocabulary(rules, len(tokenizer), special_ids(tokenizer))
    spec = StageSpec("given-rules", 1, {"tokenizer": fingerprint}, {"rules": rules.digest})

    def build(out: Path) -> Metrics:
        return write_rules(out, rules)

    return run_stage(root, spec, build)
