"""Merge checkpoints: round trip, and refusal of what does not fit, is torn or is hostile."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.merge_modules import FORMS
from support.merged_models import fresh_model
from support.pickle_bomb import PickleBomb
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import (
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.embedded.assets import embedded_names
from umim_core.errors import (
    ArtifactError,
    BackboneMismatchError,
    CheckpointError,
    TokenizerMismatchError,
    UmimError,
)
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_json, write_json, write_manifest

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


def make(backbone: Backbone, form: str = "paper", **rules: str) -> Checkpoint:
    made = fresh_model(backbone, RuleSet.from_spans(SPANS, **rules), seed=5, **FORMS[form])
    return Checkpoint.of(made, {"steps": 3, "loss": 1.5, "note": "a"})


@pytest.fixture
def saved(tiny_llama: Backbone, tmp_path: Path) -> Path:
    make(tiny_llama).save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def sign(directory: Path, schema: int = 1) -> None:
    """Write a manifest that fits whatever the directory holds now."""
    write_manifest(directory, kind="checkpoint", schema=schema, body={})


def edit(directory: Path, **changes: object) -> None:
    write_json(directory / "config.json", {**dict(read_json(directory / "config.json")), **changes})
    sign(directory)


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tiny_backbone: Backbone, form: str, tmp_path: Path) -> None:
    fingerprint = tiny_backbone.tokenizer_fingerprint
    checkpoint = make(tiny_backbone, form, tokenizer_fingerprint=fingerprint)
    checkpoint.save(tmp_path / "x")
    back = Checkpoint.load(tmp_path / "x")
    assert back.config == checkpoint.config
    assert type(back.module) is type(checkpoint.module)
    assert back.config.training == {"steps": 3, "loss": 1.5, "note": "a"}
    assert back.rules.digest == checkpoint.rules.digest
    state = checkpoint.module.state_dict()
    assert set(back.module.state_dict()) == set(state)
    for name, value in back.module.state_dict().items():
        assert torch.equal(value, state[name]), name
    spans, lengths = torch.randn(3, 4, 16), torch.tensor([2, 3, 4])
    assert torch.equal(back.module(spans, lengths), checkpoint.module(spans, lengths))
    back.check_backbone(tiny_backbone)


@pytest.mark.parametrize("name", embedded_names())
def test_a_shipped_checkpoint_is_written_again_as_it_was_read(name: str, tmp_path: Path) -> None:
    folders = tmp_path / "again", resolve_checkpoint(name)
    Checkpoint.load(name).save(folders[0])
    assert len({(folder / "config.json").read_bytes() for folder in folders}) == 1
    weights = (load_file(folder / "model.safetensors") for folder in folders)
    torch.testing.assert_close(*weights, rtol=0, atol=0, check_dtype=False)  # stored in bfloat16


def test_weights_of_another_form_are_refused(saved: Path) -> None:
    edit(saved, kind="linear")
    with pytest.raises(CheckpointError, match="must hold the tensors"):
        Checkpoint.load(saved)


def test_a_loaded_module_is_frozen_and_takes_no_random_numbers(saved: Path) -> None:
    before = torch.get_rng_state()
    module = Checkpoint.load(saved).module
    assert torch.equal(torch.get_rng_state(), before)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_holds_exactly_the_stable_files_and_no_backbone_weights(saved: Path) -> None:
    assert {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "rules/rules.parquet",
        "rules/matcher/tables.npy",
        "rules/manifest.json",
    }
    assert (saved / "model.safetensors").stat().st_size < 4 * (2 * 16 * 16 + 7 * 16) + 2048


def test_another_architecture_is_refused(
    saved: Path,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    other = wrap_backbone(tiny_model("gpt2", 0), tiny_tokenizer)
    with pytest.raises(BackboneMismatchError, match="Load the backbone it was trained for"):
        Checkpoint.load(saved).check_backbone(other)


@pytest.mark.parametrize("rules_know", [True, False])
def test_another_vocabulary_of_the_same_size_is_refused(
    tiny_llama: Backbone,
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    rules_know: bool,
) -> None:
    words = ["<eos>", *(f"w{i}" for i in range(1, 32))]
    words[3], words[4] = words[4], words[3]
    other = wrap_backbone(tiny_model("llama", 0), word_tokenizer(words))
    assert other.fingerprint == tiny_llama.fingerprint
    known = {"tokenizer_fingerprint": tiny_llama.tokenizer_fingerprint} if rules_know else {}
    checkpoint = make(tiny_llama, **known)
    checkpoint.check_backbone(tiny_llama)
    message = rf"got one of .*{other.tokenizer_fingerprint[:12]}"
    with pytest.raises(TokenizerMismatchError, match=message):
        checkpoint.check_backbone(other)


def test_an_altered_file_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors must have the SHA-256"):
        Checkpoint.load(saved)


def test_a_pickle_renamed_to_safetensors_does_nothing(saved: Path, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    pickle.loads(pickle.dumps(PickleBomb(fired)))  # noqa: S301  the bomb works
    fired.unlink()
    (saved / "model.safetensors").write_bytes(pickle.dumps(PickleBomb(fired)))
    sign(saved)
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be safetensors"):
        Checkpoint.load(saved)
    assert not fired.exists()


@pytest.mark.parametrize("declared", [1 << 20, 1 << 31, 1 << 40, 2**63, 2**64 - 1])
def test_a_huge_declared_header_is_refused(saved: Path, declared: int) -> None:
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", declared) + data[8:])
    sign(saved)
    with pytest.raises(CheckpointError, match="must be safetensors"):
        Checkpoint.load(saved)


def test_a_file_far_larger_than_the_module_is_refused_unread(saved: Path) -> None:
    with (saved / "model.safetensors").open("r+b") as stream:
        stream.truncate(1 << 26)
    sign(saved)
    with pytest.raises(CheckpointError, match="bytes; got 67108864 bytes"):
        Checkpoint.load(saved)


def test_a_huge_declared_size_allocates_nothing(saved: Path) -> None:
    edit(saved, hidden_size=1 << 16)  # 34 GB of weights
    with pytest.raises(CheckpointError, match="must hold the tensors"):
        Checkpoint.load(saved)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 1 << 17}, "hidden_size"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"raw_tail": 10**30}, "raw_tail"),
        ({"adapter_rank": 10**30}, "adapter_rank"),
        ({"num_heads": -1}, "num_heads"),
        ({"positions": "rotary"}, "positions"),
        ({"depth": 2}, "depth"),
        ({"kind": "mean"}, "kind"),
        ({"kind": "linear", "depth": 3}, "linear"),
        ({"backbone": None}, "backbone"),
        ({"training": {"loss": [1]}}, "training"),
        ({"code": "import os"}, "code"),
    ],
)
def test_a_configuration_out_of_bounds_is_refused(
    saved: Path, changes: dict[str, object], where: str
) -> None:
    edit(saved, **changes)
    with pytest.raises(CheckpointError, match=f"describe a merge checkpoint; got .*{where}"):
        Checkpoint.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.pop("query"),
        lambda weights: weights.update(extra=torch.zeros(1)),
        lambda weights: weights.update(query=torch.zeros(4, 5)),
        lambda weights: weights.clear(),
    ],
    ids=["missing", "more", "shape", "none"],
)
def test_weights_that_do_not_fit_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    weights = dict(Checkpoint.load(saved).module.state_dict())
    change(weights)
    save_file(weights, saved / "model.safetensors")
    sign(saved)
    with pytest.raises(CheckpointError, match="must hold the tensors"):
        Checkpoint.load(saved)


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        *((getattr(torch, name), True) for name in ("float16", "bfloat16", "float32", "float64")),
        *((getattr(torch, name), False) for name in ("int64", "int32", "uint8", "bool")),
        *((getattr(torch, f"float8_{name}"), False) for name in ("e4m3fn", "e5m2")),
        (torch.complex64, False),
    ],
    ids=str,
)
def test_weights_are_floating_point_numbers_of_16_bits_or_more(
    saved: Path, kind: torch.dtype, fits: bool
) -> None:
    weights = dict(Checkpoint.load(saved).module.state_dict())
    weights["query"] = weights["query"].to(kind)
    save_file(weights, saved / "model.safetensors")
    sign(saved)
    if fits:
        assert Checkpoint.load(saved).module.query.dtype == torch.float32
        return
    with pytest.raises(CheckpointError, match="floating-point weights of 16 bits or more"):
        Checkpoint.load(saved)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"raw_tail": ' + "9" * 5000 + "}",
        '{"backbone": "\\ud800"}',
        "\ufeff{}",
        "[]",
    ],
    ids=["nested", "digits", "surrogate", "BOM", "list"],
)
def test_a_configuration_that_is_no_json_object_of_ours_is_refused(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(UmimError):
        sign(saved)
        Checkpoint.load(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    tiny_llama: Backbone, tmp_path: Path, value: float
) -> None:
    checkpoint = make(tiny_llama)
    with torch.no_grad():
        checkpoint.module.linear_o.weight[3, 4] = value
    checkpoint.save(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"finite weights; got \['linear_o\.weight'\]"):
        Checkpoint.load(tmp_path / "x")


def test_an_unknown_schema_is_refused(saved: Path) -> None:
    sign(saved, schema=2)
    with pytest.raises(ArtifactError, match=r"must have schema 1; got 2\. Use the version of umim"):
        Checkpoint.load(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "rules/rules.parquet", "manifest.json"])
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ArtifactError, match="must"):
        Checkpoint.load(saved)


@pytest.mark.parametrize("name", ["no-such-checkpoint", "umim-docs-lama"])
def test_an_unknown_name_lists_the_embedded_ones(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    names = [name, *embedded_names()]
    assert len(names) == 3 and all(found in str(caught.value) for found in names)


def test_a_bound_of_decoding_without_a_merge_means_all(tiny_checkpoint: Path) -> None:
    written = read_config(tiny_checkpoint).model_dump()
    for name in ("merge", "raw_tail"):
        written.pop(name, None)
    assert CheckpointConfig.model_validate(written).recommended() == ("prompt", 16)
    bounded = CheckpointConfig.model_validate({**written, "decode_max_damage": 0.1})
    assert bounded.recommended() == ("all", 0)
    kept = bounded.model_copy(update={"merge": "prompt", "raw_tail": 16})  # both are defaults
    assert CheckpointConfig.model_validate(kept.model_dump()).recommended() == ("prompt", 16)
    assert kept.form() == bounded.form()
