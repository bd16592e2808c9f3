"""Rules by confidence through the stages: what they hold, and that they are made once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tasks.stages.mine
from flows.parts import plan
from support.sites import here, made
from support.small_recipe import least_recipe
from support.token_artifacts import write_documents
from tasks.run.stage import Artifact
from tasks.stages.mine import confidence_stage, filter_stage, given_rules_stage
from tasks.stages.named import NamedBackbone, NamedRules, NamedTokenizer
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.config.recipe import Cell
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import TokenizerMismatchError, UmimError
from umim_core.mining.mine import mine_rules
from umim_core.rules.ruleset import RuleSet
from umim_core.text.sources import TokenIds

LENGTH, SEGMENTS, SURE = 16, 21, 0.02
OPTIONS = RuleOptions(
    tau=2, source="confidence", min_probability=SURE, segment_length=LENGTH, **AS_FOUND
)


class Setting:
    """A tiny backbone on disk, and ids 1 .. 7 to ask it about (0 is special)."""

    def __init__(self, folder: Path, backbone: Path) -> None:
        self.backbone = str(backbone)
        self.ids = np.random.default_rng(0).integers(0, 8, SEGMENTS * LENGTH + 5).astype(np.int32)
        parts = np.array_split(self.ids, 5)
        self.tokenized = made(
            folder, "tokenize", lambda out: write_documents(out / "train", *parts)
        )

    def count(self, root: Path, **changes: object) -> Artifact:
        options = OPTIONS.model_copy(update=changes)
        backbone = NamedBackbone(self.backbone)
        tokens = self.tokenized.part("train")
        return confidence_stage(tokens=tokens, backbone=backbone, options=options).build(here(root))

    def rules(self, root: Path, counted: Artifact, **changes: object) -> RuleSet:
        call = filter_stage(
            counted=counted,
            tokens=self.tokenized.part("train"),
            tokenizer=NamedTokenizer(self.backbone),
            options=OPTIONS.model_copy(update=changes),
        )
        return RuleSet.load(call.build(here(root)).path / "rules")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Setting:
    return Setting(tmp_path_factory.mktemp("confidence"), tiny_checkpoint.parent / "backbone")


def test_rules_of_every_threshold_are_those_of_the_command_of_one_count(
    setting: Setting, tmp_path: Path
) -> None:
    counted, backbone, sizes = setting.count(tmp_path), load_backbone(setting.backbone), []
    assert not setting.count(tmp_path, tau=1).executed
    np.save(tmp_path / "ids.npy", setting.ids.astype(np.uint32))
    for tau in (1, 2):
        rules = setting.rules(tmp_path, counted, tau=tau)
        options, out = OPTIONS.model_copy(update={"tau": tau}), tmp_path / f"of-{tau}"
        mine_rules(
            TokenIds(path=str(tmp_path / "ids.npy")), out, backbone=backbone, options=options
        )
        assert rules.digest == RuleSet.load(out).digest and rules.options == options
        sizes.append(len(rules))
    assert sizes[0] > sizes[1] > 3


def test_a_run_that_dies_goes_on_with_the_next_piece(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = setting.count(tmp_path / "whole")
    monkeypatch.setattr(tasks.stages.mine, "_PIECE_TOKENS", 8 * LENGTH)
    asked: list[int] = []
    real = tasks.stages.mine.confidence_counts

    def dies_at_the_third(backbone: Backbone, ids: np.ndarray, *rest: object, **options: object):
        asked.append(len(ids))
        if len(asked) == 3:
            raise UmimError("a machine must stay", "gone", "Run it again.")
        return real(backbone, ids, *rest, **options)

    monkeypatch.setattr(tasks.stages.mine, "confidence_counts", dies_at_the_third)
    with pytest.raises(UmimError, match="a machine must stay"):
        setting.count(tmp_path)
    assert asked == [8 * LENGTH, 8 * LENGTH, 5 * LENGTH]
    (partial,) = tmp_path.glob("confidence/*.partial")
    torn = partial / "whole" / "state" / "piece-1" / "spans_2.npy"
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed = setting.count(tmp_path)
    assert asked[3:] == [8 * LENGTH, 5 * LENGTH]
    assert resumed.digest == whole.digest
    shutil.rmtree(tmp_path / "whole")


@pytest.fixture
def cell(tiny_checkpoint: Path) -> Cell:
    return Cell(
        backbone=str(tiny_checkpoint.parent / "backbone"), rules=str(tiny_checkpoint / "rules")
    )


def test_given_rules_are_taken_over_as_they_are_or_refused(cell: Cell, tmp_path: Path) -> None:
    given = partial(given_rules_stage, tokenizer=NamedTokenizer(cell.backbone))
    artifact = given(rules=NamedRules(cell.rules)).build(here(tmp_path))
    assert RuleSet.load(artifact.path / "rules").digest == RuleSet.load(str(cell.rules)).digest
    assert artifact.metrics["rules_2"] == 1.0
    RuleSet.from_spans([(1, 2)], tokenizer_fingerprint="f" * 64).save(tmp_path / "strange")
    with pytest.raises(TokenizerMismatchError):
        given(rules=NamedRules(str(tmp_path / "strange"))).build(here(tmp_path))


def test_nothing_is_mined_for_a_cell_of_given_rules(cell: Cell) -> None:
    recipe = least_recipe(cells=[cell.model_dump(), {"backbone": cell.backbone, "tau": 7}])
    made = [step["stage"] for step in plan(recipe)]
    assert made.count("given-rules") == 1
    assert made.count("count") == made.count("filter") == 1
