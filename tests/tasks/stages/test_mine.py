"""Stages that mine: counts equal to counting one by one, resumed, refused; confident spans.

They count in this process; that a cluster counts the same is in ``data/test_counting.py``,
``data/test_mining_faults.py`` and, quickly, in ``flows/test_full_pipeline.py``.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from flows.parts import plan
from support.ngram_oracle import grams_of
from support.sites import here, made
from support.small_recipe import least_recipe
from support.tiny_mining import LENGTH, OPTIONS, NoCluster, TinyCorpus
from support.tiny_pipeline import counting_in_process
from support.token_artifacts import write_documents
from tasks.data.counting import Counted
from tasks.run.stage import Artifact
from tasks.stages.mine import confidence_stage, filter_stage, given_rules_stage
from tasks.stages.named import NamedBackbone, NamedRules, NamedTokenizer
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.config.recipe import Cell
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import CorpusError, ResourceLimitError, TokenizerMismatchError, UmimError
from umim_core.mining.mine import mine_rules
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import directory_digest
from umim_core.text.sources import TokenIds

NOWHERE = NoCluster()


@pytest.fixture(scope="module", autouse=True)
def _here() -> Iterator[None]:
    with counting_in_process():
        yield


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer)


@pytest.fixture(scope="module")
def counted(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return corpus.count(tmp_path_factory.mktemp("counted"), NOWHERE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_documents": 4, "overlap": "none", "containment": "keep"},
        {"protect": ("^w3$",)},
        {"longest": 6, "spans": 100, "overlap": "none", "containment": "keep"},
    ],
    ids=str,
)
def test_the_stages_give_the_rule_set_of_the_command(
    corpus: TinyCorpus, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = OPTIONS.model_copy(update=changes)
    mine_rules(corpus.texts, tmp_path / "out", tokenizer=corpus.backbone, options=options)
    counted = corpus.count(tmp_path, NOWHERE, **changes)
    made = corpus.filter(tmp_path, counted, **changes).path / "rules"
    assert directory_digest(made) == directory_digest(tmp_path / "out")
    rules = RuleSet.load(made)
    whole = corpus.ids[: len(corpus.ids) // LENGTH * LENGTH].astype("<i4")
    assert rules.origin.corpus_digest == hashlib.sha256(whole.tobytes()).hexdigest()
    assert len(rules) > 50 and rules.options.protect == options.protect
    assert ("protect" in changes) == all(3 not in gram for gram in grams_of(rules))


def test_memory_beyond_the_limit_is_refused_before_anything_is_counted(
    corpus: TinyCorpus, tmp_path: Path, saved: list[int]
) -> None:
    with pytest.raises(ResourceLimitError) as caught:
        corpus.count(tmp_path, NOWHERE, max_memory_gib=0.0001, block_tokens=1000)
    assert str(caught.value).startswith("mining must take at most 0.0001 GiB of memory; got ")
    assert "GiB for 6,000 tokens. Raise tau or the limit" in str(caught.value)
    assert saved == []
    assert not list(tmp_path.glob("count/*/manifest.json"))


def test_a_finished_order_is_not_counted_again(
    corpus: TinyCorpus,
    counted: Artifact,
    tmp_path: Path,
    saved: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command line, where another test has run it, keeps this log to itself.
    monkeypatch.setattr(logging.getLogger("umim"), "propagate", True)
    keep = tasks.stages.mine._kept_order

    def dying(state: Path, found: int, count: Callable[[], Counted]) -> Counted:
        kept = keep(state, found, count)
        if found == 2:
            raise RuntimeError("died on purpose")
        return kept

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="died on purpose"):
        patch.setattr(tasks.stages.mine, "_kept_order", dying)
        corpus.count(tmp_path, NOWHERE)
    (state,) = tmp_path.glob("count/*.partial/whole/state")
    assert [path.name for path in state.glob("order-*")] == ["order-2"]
    saved.clear()
    with caplog.at_level(logging.INFO, "umim.stage"):
        again = corpus.count(tmp_path, NOWHERE)
    assert again.digest == counted.digest
    assert saved == [3, 4]
    told = [message for message in caplog.messages if "finished" in message]
    assert told == ["order 2 was finished by an earlier run"]


def test_more_documents_than_there_are_give_no_empty_rule_set(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    corpus.count(tmp_path, NOWHERE, min_documents=2)
    found = corpus.count(tmp_path, NOWHERE, min_documents=1000)
    assert not found.executed
    with pytest.raises(CorpusError, match=r"min_documents is 1000, .* as many documents; got 86"):
        corpus.filter(tmp_path, found, min_documents=1000)
    assert not list(tmp_path.glob("filter/*"))


# Confident spans, and given rules

WIDTH, SEGMENTS = 16, 21
SURE = RuleOptions(
    tau=2, source="confidence", min_probability=0.02, segment_length=WIDTH, **AS_FOUND
)


class Setting:
    """A tiny backbone on disk, and ids 1 .. 7 to ask it about (0 is special)."""

    def __init__(self, folder: Path, backbone: Path) -> None:
        self.backbone = str(backbone)
        self.ids = np.random.default_rng(0).integers(0, 8, SEGMENTS * WIDTH + 5).astype(np.int32)
        parts = np.array_split(self.ids, 5)
        self.tokenized = made(
            folder, "tokenize", lambda out: write_documents(out / "train", *parts)
        )

    def count(self, root: Path, **changes: object) -> Artifact:
        options = SURE.model_copy(update=changes)
        backbone = NamedBackbone(self.backbone)
        tokens = self.tokenized.part("train")
        return confidence_stage(tokens=tokens, backbone=backbone, options=options).build(here(root))

    def rules(self, root: Path, counted: Artifact, **changes: object) -> RuleSet:
        call = filter_stage(
            counted=counted,
            tokens=self.tokenized.part("train"),
            tokenizer=NamedTokenizer(self.backbone),
            options=SURE.model_copy(update=changes),
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
        options, out = SURE.model_copy(update={"tau": tau}), tmp_path / f"of-{tau}"
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
    monkeypatch.setattr(tasks.stages.mine, "_PIECE_TOKENS", 8 * WIDTH)
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
    assert asked == [8 * WIDTH, 8 * WIDTH, 5 * WIDTH]
    (partial,) = tmp_path.glob("confidence/*.partial")
    torn = partial / "whole" / "state" / "piece-1" / "spans_2.npy"
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed = setting.count(tmp_path)
    assert asked[3:] == [8 * WIDTH, 5 * WIDTH]
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
