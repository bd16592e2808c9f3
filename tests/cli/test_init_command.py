"""``umim init``: a checkpoint without training, which generates at once and can be trained on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from support.command_line import Umim, document
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.rules.ruleset import RuleSet

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


@pytest.fixture
def model(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint.parent / "backbone"


@pytest.fixture
def rules(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    fingerprint = tokenizer_fingerprint(tiny_tokenizer)
    RuleSet.from_spans(SPANS, tokenizer_fingerprint=fingerprint).save(tmp_path / "rules")
    return tmp_path / "rules"


def test_a_checkpoint_gives_the_last_embedding_and_generates(
    umim: Umim, model: Path, rules: Path, tmp_path: Path
) -> None:
    done = umim("init", model, "--rules", rules, "--out", tmp_path / "start")
    assert done.code == 0, done.err
    checkpoint = Checkpoint.load(tmp_path / "start")
    backbone = load_backbone(str(model))
    span = torch.tensor([[3, 4, 5]])
    made = checkpoint.module(backbone.embed(span), torch.tensor([3]))
    assert torch.equal(made, backbone.embed(span)[:, -1])
    assert checkpoint.config.training["steps"] == 0
    command = next(shlex.split(line) for line in done.out.splitlines() if "umim generate" in line)
    assert umim(*command[1:3], "-c", tmp_path / "start", "--max-new-tokens", 2).code == 0


def test_a_root_that_cannot_be_written_costs_the_name_alone(
    umim: Umim, model: Path, rules: Path, tmp_path: Path
) -> None:
    (tmp_path / "root").write_text("")
    done = umim("init", model, "--rules", rules, "--out", tmp_path / "start", "--json")
    assert document(done)["name"] is None
    Checkpoint.load(tmp_path / "start")


def test_a_folder_that_exists_is_refused_before_the_model_is_read(
    umim: Umim, rules: Path, tmp_path: Path
) -> None:
    (tmp_path / "start").mkdir()
    done = umim("init", tmp_path / "absent", "--rules", rules, "--out", tmp_path / "start")
    assert (done.code, list((tmp_path / "start").iterdir())) == (1, [])
    assert "must not exist" in done.err


def test_what_is_no_rule_directory_is_refused(umim: Umim, model: Path) -> None:
    done = umim("init", model)
    assert done.code == 1 and "umim mine" in done.err
