"""Loading a model: sources of its backbone, mismatches, and what a checkpoint recommends."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support.tiny_models import tiny_model
from umim_core import UMIM
from umim_core.backbone.devices import fastest_dtype
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import (
    BackboneError,
    BackboneMismatchError,
    CheckpointError,
    ConfigError,
    RuleSetError,
    TokenizerMismatchError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.model.compression import compress_text
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import recording_reductions

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


@pytest.fixture
def home(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny backbone whose files may be changed."""
    return Path(shutil.copytree(tiny_checkpoint.parent / "backbone", tmp_path / "backbone"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def in_memory(home: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(home, trust_remote_code=False)


def test_a_model_in_memory_is_used_and_left_as_it_is(
    tiny_checkpoint: Path, tiny_umim: UMIM, home: Path
) -> None:
    model = in_memory(home).train()
    tokenizer = AutoTokenizer.from_pretrained(home, trust_remote_code=False)
    umim = UMIM.from_pretrained(tiny_checkpoint, model=model, tokenizer=tokenizer)
    expected = tiny_umim.generate(TEXT, max_new_tokens=5)
    assert umim.generate(TEXT, max_new_tokens=5).ids == expected.ids
    assert umim.backbone.tokenizer is tokenizer
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    alone = UMIM.from_pretrained(tiny_checkpoint, model=model)
    assert alone.backbone.encode("w3 w1") == [3, 1]  # by the checkpoint's own tokenizer


def test_a_backbone_may_be_a_path(tiny_checkpoint: Path, home: Path) -> None:
    loaded = UMIM.from_pretrained(tiny_checkpoint, backbone=home, dtype="float32")
    assert loaded.backbone.name == str(home)


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (None, getattr(torch, fastest_dtype("cpu"))),
        ("auto", getattr(torch, fastest_dtype("cpu"))),
        ("published", torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_the_data_type_may_be_the_fastest_the_published_one_or_torchs(
    tiny_checkpoint: Path, tmp_path: Path, dtype: str | torch.dtype | None, found: torch.dtype
) -> None:
    in_memory(tiny_checkpoint.parent / "backbone").to(torch.bfloat16).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint.parent / "backbone" / name, tmp_path)
    umim = UMIM.from_pretrained(tiny_checkpoint, backbone=str(tmp_path), dtype=dtype)
    assert umim.backbone.dtype is found


def test_settings_that_change_nothing_are_no_mismatch_with_them_and_without(
    tiny_checkpoint: Path, home: Path, tmp_path: Path
) -> None:
    edit(home / "config.json", attention_dropout=0.1, my_note="hello", initializer_range=0.5)
    umim = UMIM.from_pretrained(tiny_checkpoint, backbone=str(home))
    assert "backbone_mismatch" not in umim.checkpoint.config.training
    assert umim.checkpoint.backbone_differences(umim.backbone) == []
    made = Checkpoint.of(MergedModel(umim.backbone, umim.checkpoint.module, Matcher(umim.rules)))
    made.save(tmp_path / "made")
    loaded = UMIM.from_pretrained(
        tmp_path / "made", backbone=str(tiny_checkpoint.parent / "backbone")
    )
    assert loaded.checkpoint.backbone_differences(loaded.backbone) == []
    assert loaded.backbone.fingerprint != umim.backbone.fingerprint


def test_an_added_padding_token_is_no_mismatch(tiny_checkpoint: Path, home: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(home, trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == 32
    UMIM.from_pretrained(tiny_checkpoint, model=in_memory(home), tokenizer=tokenizer)
    tokenizer.add_tokens(["w1 w2"])
    with pytest.raises(TokenizerMismatchError):
        UMIM.from_pretrained(tiny_checkpoint, model=in_memory(home), tokenizer=tokenizer)


def test_an_explicit_override_is_recorded_in_what_is_saved(
    tiny_checkpoint: Path, home: Path, tmp_path: Path
) -> None:
    model = in_memory(home)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 64).round() / 64)  # as a quantised backbone
    reason = "8 bit, measured: perplexity + 0.1"
    umim = UMIM.from_pretrained(tiny_checkpoint, model=model, allow_backbone_mismatch=reason)
    assert umim.generate(TEXT, max_new_tokens=3).ids
    umim.save_pretrained(tmp_path / "noted")
    note = Checkpoint.load(tmp_path / "noted").config.training["backbone_mismatch"]
    assert str(note).startswith(reason)
    assert "the weights" in str(note)


def test_a_mismatch_names_the_fields_and_is_overridden_with_a_reason_at_the_same_size(
    tiny_checkpoint: Path, home: Path
) -> None:
    edit(home / "config.json", rms_norm_eps=0.5, attention_dropout=0.1)
    for backbone, reason, said in (
        (str(home), None, r"differs in: rms_norm_eps 1e-06 -> 0\.5\. Load"),
        (str(home), " ", "rms_norm_eps"),
        ("umim-docs-llama", "larger", "embedding size 16 -> "),
    ):
        options = {"backbone": backbone, "allow_backbone_mismatch": reason}
        with pytest.raises(BackboneMismatchError, match=said):
            UMIM.from_pretrained(tiny_checkpoint, **options)


def test_protected_tokens_are_in_no_rule_and_in_none_that_is_saved(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    umim = UMIM.from_pretrained(tiny_checkpoint, protect=["w4", "^w8$"])
    assert umim.compress("w1 w2 w3 w4 w5 w6 w7 w8 w9").spans == ((0, 2),)
    assert umim.rules.options.protect == ("w4", "^w8$")
    umim.save_pretrained(tmp_path / "cut")
    again = UMIM.from_pretrained(tmp_path / "cut", protect="w4")
    assert again.rules.digest == umim.rules.digest
    assert again.rules.options.protect == ("w4", "^w8$")


PRICES = (0.05, 0.2, 0.8)


@pytest.fixture
def priced(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    made = Checkpoint.load(tiny_checkpoint)
    rules = replace(made.rules, prices=np.array(PRICES, np.float32))
    ids = np.array([int(word[1:]) for word in TEXT.split()])
    rules = recording_reductions(rules, (ids, np.array([0, len(ids)])))
    made.with_contents(made.module, rules).save(tmp_path / "priced")
    return tmp_path / "priced"


@pytest.mark.parametrize(
    ("own", "budget", "units"),
    [(None, 0.1, 9), (None, 0.5, 7), (0.1, None, 9), (0.1, 0.5, 7), (0.1, math.inf, 4)],
)
def test_dearer_rules_go(
    priced: Path, tmp_path: Path, own: float | None, budget: float | None, units: int
) -> None:
    made = Checkpoint.load(priced)
    replace(made, config=made.config.model_copy(update={"budget": own})).save(tmp_path / "own")
    umim = UMIM.from_pretrained(tmp_path / "own", budget=budget)
    assert umim.checkpoint.config.budget is None
    if budget is None:
        assert len(compress_text(TEXT, str(tmp_path / "own")).units) == units
    assert len(umim.compress(TEXT).units) == units
    umim.save_pretrained(tmp_path / "again")
    assert Checkpoint.load(tmp_path / "again").rules.digest == umim.rules.digest


@pytest.mark.parametrize(
    ("target", "units"), [(0.05, 9), (0.1, 9), (0.2, 7), (0.3, 7), (0.31, 4), (0.6, 4)]
)
def test_the_cheapest_rules_stay_that_reach_a_reduction(
    priced: Path, tmp_path: Path, target: float, units: int
) -> None:
    umim = UMIM.from_pretrained(priced, target_tr=target)
    assert len(umim.compress(TEXT).units) == units <= math.ceil(10 * (1 - target))
    umim.save_pretrained(tmp_path / "again")
    if len(umim.rules) < len(PRICES):  # what is left saves another share of each price
        with pytest.raises(RuleSetError, match="umim prune CHECKPOINT TEXTS --keep-all"):
            UMIM.from_pretrained(tmp_path / "again", target_tr=target)


MODEL = tiny_model()
UNMEASURED = "umim prune CHECKPOINT TEXTS --keep-all"
# A checkpoint, options of its loading, and how they are refused.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("tiny", {"torch_dtype": 1}, TypeError, r"options \['torch_dtype'\]; known are .*dtype"),
    ("tiny", {"model": MODEL, "dtype": "auto"}, BackboneError, "has its data type and device; got"),
    ("tiny", {"model": MODEL, "backbone": "a"}, BackboneError, "must not both be given"),
    ("tiny", {"tokenizer": object()}, BackboneError, "must come with its model"),
    ("tiny", {"backbone_revision": "a"}, BackboneError, "a backbone that is named; got a. Name"),
    ("tiny", {"model": MODEL, "tokenizer": "a"}, BackboneError, "one of transformers; got str"),
    ("tiny", {"model": torch.nn.Linear(2, 2)}, BackboneError, "of transformers itself; got Linear"),
    ("tiny", {"attn_implementation": "flex_attention"}, BackboneError, "take an additive mask"),
    ("tiny", {"protect": "("}, ConfigError, "pattern must be a regular expression or one of"),
    ("tiny", {"protect": 5}, ConfigError, "expression or one of .*; got 5 \\(no text\\)"),
    ("tiny", {"allow_backbone_mismatch": True}, ConfigError, "must say why .*; got True"),
    ("tiny", {"protect": "w"}, ConfigError, "must leave tokens that rules can use"),
    ("tiny", {"protect": ["w1$", "w4$", "w7$"]}, RuleSetError, "rules must be left .* none of"),
    ("tiny", {"target_tr": 0.1}, RuleSetError, UNMEASURED),
    ("tiny", {"budget": 0.1}, RuleSetError, UNMEASURED),
    ("priced", {"target_tr": 0.7}, RuleSetError, r"reduction of 0\.7; got 0\.6 with all 3"),
    *(("priced", {"budget": b}, RuleSetError, r"the cheapest of 3 rules costs 0\.05")
      for b in (0, 0.01)),
    *(("absent", {"target_tr": t}, ConfigError, "reduction must lie above 0")
      for t in (0, 0.95, math.nan, "0.1")),
    *(("absent", {"budget": b}, ConfigError, "must be a number of nats")
      for b in (-0.1, math.nan, "0.1", True)),
    ("absent", {"budget": 0.1, "target_tr": 0.1}, ConfigError, "by a budget or by target_tr"),
    ("nobody/nothing", {"local_files_only": True}, CheckpointError, "hub repository within reach"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "message"), REFUSED)
def test_what_cannot_be_loaded_so_is_refused(
    tiny_checkpoint: Path, priced: Path, name: str, options: dict[str, Any],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    place = {"tiny": tiny_checkpoint, "priced": priced}.get(name, name)
    with pytest.raises(error, match=message):
        UMIM.from_pretrained(place, **options)


def test_a_reduction_needs_what_was_recorded_with_the_prices(
    priced: Path, tiny_checkpoint: Path
) -> None:
    made = Checkpoint.load(priced)
    rules = replace(made.rules, origin=Checkpoint.load(tiny_checkpoint).rules.origin)
    with pytest.raises(RuleSetError, match="recorded with their prices; got 3 rules without it"):
        UMIM.from_pretrained(made.with_contents(made.module, rules), target_tr=0.1)


def test_a_budget_and_protected_tokens_go_together(priced: Path) -> None:
    assert len(UMIM.from_pretrained(priced, budget=0.5, protect="w1$").rules) == 1


def test_lm_eval_takes_it(priced: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")
    from umim_core.evaluation.harness import UmimLM

    for name, value in {"budget": 0.5, "target_tr": 0.1, "protect": "w1$"}.items():
        model = UmimLM.create_from_arg_string(f"checkpoint={priced},{name}={value}")
        rules = UMIM.from_pretrained(priced, **{name: value}).rules
        assert model.get_model_info()["umim"]["rules_digest"] == rules.digest


def test_a_bound_of_decoding_is_the_models_and_of_no_use_for_rules_without_prices(
    priced: Path, tmp_path: Path
) -> None:
    """What merges under a bound, and what a request says instead: ``inference/test_options.py``."""
    checkpoint = Checkpoint.load(priced)
    bounded, unpriced = checkpoint.decoding_under(0.4), replace(checkpoint.rules, prices=None)
    bounded.save(tmp_path / "made")
    umim = UMIM.from_pretrained(tmp_path / "made")
    assert (umim.checkpoint.config.decode_max_damage, umim.checkpoint.config.merge) == (0.4, "all")
    assert umim.merged_model.decode_max_damage == 0.4
    assert bounded.with_contents(bounded.module, checkpoint.rules).config.decode_max_damage == 0.4
    without = bounded.with_contents(bounded.module, unpriced)
    assert without.config.decode_max_damage is None
    with pytest.raises(RuleSetError, match="needs the price of every rule"):
        without.decoding_under(0.4)


@pytest.mark.parametrize(
    ("said", "merge", "raw_tail"),
    [
        ({}, "prompt", 2),
        ({"merge": "all"}, "all", 0),
        ({"raw_tail": 0}, "prompt", 0),
        ({"merge": "none"}, "none", 0),
        ({"decode_max_damage": math.inf}, "all", 2),
        ({"merge": "all", "raw_tail": 0}, "all", 0),
    ],
)
def test_a_recommendation_is_taken_where_the_caller_says_nothing(
    tiny_umim: UMIM, tmp_path: Path, said: dict[str, object], merge: str, raw_tail: int
) -> None:
    tiny_umim.checkpoint.recommending("prompt", 2).save(tmp_path / "made")
    umim = UMIM(tiny_umim.backbone, Checkpoint.load(tmp_path / "made"))
    found = umim.generate(TEXT, max_new_tokens=4, **said)
    assert (found.merge, found.raw_tail) == (merge, raw_tail)
    whole = said | {"merge": merge, "raw_tail": raw_tail}
    assert found == tiny_umim.generate(TEXT, max_new_tokens=4, **whole)
