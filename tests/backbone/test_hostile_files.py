"""Files of a backbone that lie: each ends in one typed error, soon, before memory is taken."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.embedded.assets import embedded_path
from umim_core.errors import BackboneError, CorpusError
from umim_core.evaluation.harness import UmimLM
from umim_core.text.token_ids import encode

pytestmark = pytest.mark.timeout(60)
Document = dict[str, Any]
SETTINGS = "generation_config.json"
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = embedded_path("umim-docs-llama", "backbone")
    assert source is not None
    return Path(shutil.copytree(source, tmp_path / "model"))


def edit(path: Path, change: Callable[[Document], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def split_by(pattern: str) -> Callable[[Document], object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return lambda document: document.update(pre_tokenizer=split | {"invert": False})


def normalised_by(*parts: Document) -> Callable[[Document], object]:
    sequence = {"type": "Sequence", "normalizers": list(parts)}
    return lambda document: document.update(normalizer=sequence)


def added(**token: object) -> Callable[[Document], object]:
    entry = SPECIAL | {"content": "<z>", "special": True} | token
    return lambda document: document["added_tokens"].append(entry)


@pytest.mark.parametrize("text", ["", "[" * 200_000, "[]", "{}", "5", "\xff", '{"\\ud800": 1}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_what_is_no_description_is_refused(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text, encoding="latin-1")
    try:
        load_backbone(str(model))
    except BackboneError:
        return
    assert name == "tokenizer_config.json"  # the others say what the model is
    assert text in ("{}", '{"\\ud800": 1}')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (split_by("(a+)+$"), "retry-limit-in-match over"),
        (split_by("(?:z|zz)+$"), "retry-limit-in-match over"),
        (split_by("("), "unmatched parenthesis"),
        (lambda document: document["model"]["vocab"].update(z9=1 << 31), "must be below 4,194,304"),
        (lambda document: document["model"]["vocab"].update(z9="1"), "not supported between"),
        (lambda document: document["model"]["vocab"].update(z9=-1), "expected u32"),
        (lambda document: document["model"]["merges"].append(["q", "zzzq"]), "out of vocabulary"),
        (lambda document: document["model"].pop("vocab"), "'vocab'"),
        (added(id=1 << 31), "must be below 4,194,304"),
        (normalised_by({"type": "Prepend", "prepend": "a" * 1000}), "makes 1,000 characters of"),
        (
            normalised_by(
                *[{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}] * 9
            ),
            "makes 1,000,000,000 characters of one",
        ),
        (
            lambda document: document["post_processor"].update(
                single=[{"SpecialToken": {"id": "z", "type_id": 0}}]
            ),
            "no entry found for key",
        ),
    ],
)
def test_a_tokenizer_that_takes_all_time_or_memory_is_refused(
    model: Path, change: Callable[[Document], object], said: str
) -> None:
    edit(model / "tokenizer.json", change)
    with pytest.raises(BackboneError) as error:
        load_tokenizer(str(model))
    assert said in str(error.value)


def test_a_text_that_a_regular_expression_gives_up_is_named(model: Path) -> None:
    edit(model / "tokenizer.json", split_by("(?:ab|a|b)+$"))
    tokenizer = load_tokenizer(str(model))
    assert encode(tokenizer, "abc")
    with pytest.raises(CorpusError, match="the tokenizer can cut; got Onig"):
        encode(tokenizer, "ab" * 40 + "x")


WRONG: dict[str, list[Document]] = {
    "tokenizer_config.json": [
        {"tokenizer_class": 5},
        {"eos_token": 5},
        {"eos_token": "\ud800"},
        {"added_tokens_decoder": {"x": [1]}},
        {"extra_special_tokens": 5},
    ],
    "config.json": [
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"hidden_size": -1},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"num_hidden_layers": 10**8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": 5},
        {"hidden_act": "none"},
        {"layer_types": ["none"]},
        {"quantization_config": 5},
        {"model_type": 5},
        {"max_position_embeddings": 0},
    ],
    SETTINGS: [
        {"num_return_sequences": 2},
        {"num_return_sequences": "2", "do_sample": True},
        {"max_new_tokens": 0},
    ],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(n, changes) for n, known in WRONG.items() for changes in known], ids=str
)
def test_settings_of_no_tokenizer_and_of_no_model_are_refused(
    model: Path, name: str, changes: Document
) -> None:
    edit(model / name, lambda document: document.update(changes))
    with pytest.raises(BackboneError, match=SETTINGS if name == SETTINGS else None):
        load_backbone(str(model))


LAYER = "model.layers.1.mlp.down_proj.weight"


def rewritten(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    return write


def pickled(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda model: os.truncate(model / "model.safetensors", 200), "safetensors weights"),
        (pickled, "a directory with safetensors weights"),
        (
            lambda model: edit(model / "config.json", lambda d: d.update(intermediate_size=64)),
            "its weights have other sizes than its config.json says",
        ),
        (rewritten(lambda weights: weights.pop(LAYER)), f"lacks {LAYER}"),
        *(
            (rewritten(lambda w, kind=kind: w.update({LAYER: w[LAYER].to(kind)})), f"{LAYER} is")
            for kind in (torch.int64, torch.uint8, torch.bool, torch.complex64)
        ),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(
    model: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(model)
    with pytest.raises(BackboneError) as error:
        load_backbone(str(model))
    assert said in str(error.value)


@pytest.mark.parametrize("family", ["evil", "llama"])
def test_code_is_refused_even_if_the_user_would_agree(
    model: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = model / "fired"
    (model / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
        "from transformers import PreTrainedTokenizerFast as T\n"
    )
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    edit(model / "config.json", lambda document: document.update(model_type=family, auto_map=code))
    code = {"AutoTokenizer": [None, "evil.T"]}
    edit(model / "tokenizer_config.json", lambda document: document.update(auto_map=code))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(BackboneError, match=r"backbone must come without code of its own; .*evil"):
        load_backbone(str(model))
    with pytest.raises(BackboneError, match="tokenizer must come without code of its own"):
        load_tokenizer(str(model))
    with pytest.raises(BackboneError, match="without code of its own"):  # as lm-eval loads it
        UmimLM(backbone=str(model), merge="none")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_pipes_and_huge_files_are_not_read(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(BackboneError, match="no regular file"):
        load_backbone(str(model))
    (model / name).unlink()
    with (model / name).open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(BackboneError, match="1,073,741,824 bytes"):
        load_backbone(str(model))
