"""Rules by confidence through the stages: what they hold, and that they are made once."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks.stages.mine
from support.ngram_oracle import grams_of
from support.sites import here, made
from support.token_artifacts import write_documents
from tasks.run.stage import Artifact
from tasks.stages.mine import confidence_rules_stage, confidence_stage
from tasks.stages.named import NamedBackbone, NamedTokenizer
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import UmimError
from umim_core.rules.ruleset import RuleSet

LENGTH, SEGMENTS, SURE = 16, 21, 0.02
OPTIONS = RuleOptions(
    tau=2, source="confidence", min_probability=SURE, segment_length=LENGTH, **AS_FOUND
)
Runs = Counter[tuple[int, ...]]


class Setting:
    """A tiny backbone on disk, and ids 1 .. 7 to ask it about (0 is special)."""

    def __init__(self, folder: Path, backbone: Backbone) -> None:
        backbone.model.save_pretrained(folder / "backbone")
        assert backbone.tokenizer is not None
        backbone.tokenizer.save_pretrained(folder / "backbone")
        self.backbone = str(folder / "backbone")
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
        options = OPTIONS.model_copy(update=changes)
        tokenizer = NamedTokenizer(self.backbone)
        call = confidence_rules_stage(counted=counted, tokenizer=tokenizer, options=options)
        return RuleSet.load(call.build(here(root)).path / "rules")

    def runs(self, segments: int = SEGMENTS) -> Runs:
        """Find the runs token by token; a segment's first token and ``<eos>`` end one."""
        model, found = load_backbone(self.backbone).model, Runs()
        for row in self.ids[: segments * LENGTH].reshape(-1, LENGTH).tolist():
            logits = model(input_ids=torch.tensor([row])).logits[0].double()
            sure = [False, *(logits.softmax(-1)[range(LENGTH - 1), row[1:]] > SURE).tolist()]
            run: tuple[int, ...] = ()
            for token, flag in [*zip(row, sure, strict=True), (0, False)]:
                if flag and token:
                    run = (*run, token)
                else:
                    found[run] += 1
                    run = ()
        return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Backbone) -> Setting:
    return Setting(tmp_path_factory.mktemp("confidence"), tiny_llama)


def test_rules_are_the_runs_that_occur_often_enough(setting: Setting, tmp_path: Path) -> None:
    rules = setting.rules(tmp_path, setting.count(tmp_path))
    runs = setting.runs()
    assert max(map(len, runs)) > 4  # a longer run to discard
    expected = {run: n for run, n in runs.items() if 2 <= len(run) <= 4 and n >= 2}
    assert grams_of(rules) == expected
    assert len(expected) > 3
    assert rules.options == OPTIONS


def test_thresholds_share_what_the_backbone_was_asked(setting: Setting, tmp_path: Path) -> None:
    counted = setting.count(tmp_path)
    assert not setting.count(tmp_path, tau=1).executed
    every, twice = (grams_of(setting.rules(tmp_path, counted, tau=tau)) for tau in (1, 2))
    assert twice == {run: n for run, n in every.items() if n >= 2} != every


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
