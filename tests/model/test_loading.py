"""Loading a model: sources of its backbone, and which differences make it a mismatch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from umim_core import UMIM, Checkpoint
from umim_core.backbone.devices import fastest_dtype
from umim_core.errors import (
    BackboneError,
    BackboneMismatchError,
    CheckpointError,
    ConfigError,
    RuleSetError,
    TokenizerMismatchError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

TEXT = "w1 w2 w10 w3 w4 w5"


@pytest.fixture
def home(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny backbone whose files may be changed."""
    return Path(shutil.copytree(tiny_checkpoint.parent / "backbone", tmp_path / "backbone"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def in_memory(home: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(home, trust_remote_code=False)


def test_a_model_in_memory_is_used_and_left_as_it_is(tiny_checkpoint: Path, home: Path) -> None:
    model = in_memory(home).train()
    tokenizer = AutoTokenizer.from_pretrained(home, trust_remote_code=False)
    umim = UMIM.from_pretrained(tiny_checkpoint, model=model, tokenizer=tokenizer)
    expected = UMIM.from_pretrained(tiny_checkpoint, dtype="float32").generate(
        TEXT, max_new_tokens=5
    )
    assert umim.generate(TEXT, max_new_tokens=5).ids == expected.ids
    assert umim.backbone.tokenizer is tokenizer
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_tokenizer_of_a_model_in_memory_is_the_checkpoints_own(
    tiny_checkpoint: Path, home: Path
) -> None:
    umim = UMIM.from_pretrained(tiny_checkpoint, model=in_memory(home))
    assert umim.backbone.encode("w3 w1") == [3, 1]


def test_a_backbone_may_be_a_path_and_a_model_must_be_transformers(
    tiny_checkpoint: Path, home: Path
) -> None:
    loaded = UMIM.from_pretrained(tiny_checkpoint, backbone=home, dtype="float32")
    assert loaded.backbone.name == str(home)
    with pytest.raises(BackboneError, match="a model of transformers itself; got Linear"):
        UMIM.from_pretrained(tiny_checkpoint, model=torch.nn.Linear(2, 2))


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


def test_attention_that_takes_no_mask_is_refused_at_load(tiny_checkpoint: Path) -> None:
    with pytest.raises(BackboneError, match="must take an additive mask"):
        UMIM.from_pretrained(tiny_checkpoint, attn_implementation="flex_attention")


def test_a_hub_name_without_the_network_is_a_typed_error() -> None:
    with pytest.raises(CheckpointError, match="hub repository within reach"):
        UMIM.from_pretrained("nobody/nothing", local_files_only=True)


def test_options_that_do_not_go_together_are_refused(tiny_checkpoint: Path, home: Path) -> None:
    model = in_memory(home)
    load = UMIM.from_pretrained
    with pytest.raises(TypeError, match=r"unknown options \['torch_dtype'\]; known are .*dtype"):
        load(tiny_checkpoint, torch_dtype="auto")
    with pytest.raises(BackboneError, match="has its data type and device; got"):
        load(tiny_checkpoint, model=model, dtype="auto")
    with pytest.raises(BackboneError, match="must not both be given"):
        load(tiny_checkpoint, model=model, backbone="umim-docs-llama")
    with pytest.raises(BackboneError, match="must come with its model"):
        load(tiny_checkpoint, tokenizer=object())
    with pytest.raises(BackboneError, match="one of transformers; got str"):
        load(tiny_checkpoint, model=model, tokenizer="umim-docs-llama")
    with pytest.raises(ConfigError, match="must not both be given"):
        load(tiny_checkpoint, device="cpu", device_map="cpu")


NEUTRAL = {"attention_dropout": 0.1, "my_note": "hello", "initializer_range": 0.5}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_setting_that_changes_nothing_is_no_mismatch(
    tiny_checkpoint: Path, home: Path, name: str
) -> None:
    edit(home / "config.json", **{name: NEUTRAL[name]})
    umim = UMIM.from_pretrained(tiny_checkpoint, backbone=str(home))
    assert "backbone_mismatch" not in umim.checkpoint.config.training
    assert umim.checkpoint.backbone_differences(umim.backbone) == []


def test_a_checkpoint_of_a_model_with_such_a_setting_takes_the_model_without(
    tiny_checkpoint: Path, home: Path, tmp_path: Path
) -> None:
    edit(home / "config.json", **NEUTRAL)
    umim = UMIM.from_pretrained(tiny_checkpoint, backbone=str(home))
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


def test_a_mismatch_names_the_fields_with_both_values(tiny_checkpoint: Path, home: Path) -> None:
    edit(home / "config.json", rms_norm_eps=0.5, attention_dropout=0.1)
    with pytest.raises(
        BackboneMismatchError, match=r"differs in: rms_norm_eps 1e-06 -> 0\.5\. Load"
    ):
        UMIM.from_pretrained(tiny_checkpoint, backbone=str(home))


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


def test_an_override_without_a_reason_or_of_another_size_is_refused(
    tiny_checkpoint: Path, home: Path
) -> None:
    edit(home / "config.json", rms_norm_eps=0.5)
    with pytest.raises(BackboneMismatchError, match="rms_norm_eps"):
        UMIM.from_pretrained(tiny_checkpoint, backbone=str(home), allow_backbone_mismatch=" ")
    with pytest.raises(BackboneMismatchError, match="embedding size 16 -> "):
        UMIM.from_pretrained(
            tiny_checkpoint, backbone="umim-docs-llama", allow_backbone_mismatch="larger"
        )


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


@pytest.mark.parametrize(
    ("protect", "error", "message"),
    [
        ("(", ConfigError, "a protected pattern must be a regular expression or one of"),
        ("w", ConfigError, "must leave tokens that rules can use"),
        (["w1$", "w4$", "w7$"], RuleSetError, "rules must be left .* none of"),
    ],
)
def test_patterns_that_leave_no_rule_are_refused(
    tiny_checkpoint: Path, protect: str | list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        UMIM.from_pretrained(tiny_checkpoint, protect=protect)
