"""Exported models: what transformers computes, what they may write, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from support.command_line import Umim, console, document
from support.exported_models import SPANS, Exported
from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.untrained import fresh_module
from umim_core.config.form import ModuleForm
from umim_core.errors import (
    ArtifactError,
    ConfigError,
    RuleSetError,
    TokenizerMismatchError,
    UmimError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.model_export import export_model
from umim_core.serving.span_files import ADAPTERS, SpanTable, read_adapters


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def checkpoint_of(backbone: Any, form: ModuleForm, spans: Any = ((1, 2), (3, 4, 5))) -> UMIM:
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint or None)
    module = fresh_module(backbone, rules, form, 0)
    merged_model = MergedModel(
        backbone, module, Matcher(rules), form.unit_positions, merge_depth=form.merge_depth
    )
    return UMIM(backbone, Checkpoint.of(merged_model))


def test_the_directory_is_a_plain_model_of_more_rows(exported: Exported) -> None:
    config = json.loads((exported.directory / "config.json").read_text())
    assert config["vocab_size"] == 8192 + SPANS
    assert config["tie_word_embeddings"] is False
    assert exported.merger.span_count == SPANS
    assert exported.merger.raw_tail == 16
    weights = load_file(exported.directory / "model.safetensors")
    assert len(list(exported.directory.glob("*.safetensors"))) == 1  # vLLM reads all of them
    own = exported.umim.backbone
    assert torch.equal(weights["model.embed_tokens.weight"][:8192], own.embedding_weight)
    assert torch.equal(weights["lm_head.weight"][:8192], own.head_weight)
    assert not weights["lm_head.weight"][8192:].any()
    tokenizer = AutoTokenizer.from_pretrained(exported.directory)
    assert tokenizer_fingerprint(tokenizer) == exported.merger.fingerprint


@torch.no_grad()
def test_transformers_computes_what_our_engine_does(exported: Exported) -> None:
    umim, merged_tokens = exported.umim, 0
    for ids in exported.prompts(4):
        merged = exported.merger.merge(ids)
        merged_tokens += len(ids) - len(merged)
        packed = umim.merged_model.reading("prompt", 16).pack_prompts([np.array(ids)])
        wanted = umim.backbone.head(umim.backbone.hidden(umim.merged_model.embed(packed)))[0]
        found = exported.model(torch.tensor([merged])).logits[0, :, : umim.backbone.vocab_size]
        assert float((found - wanted).abs().max()) <= 1e-4
        ours = umim.generate([ids], merge="prompt", raw_tail=16, max_new_tokens=16, do_sample=False)
        theirs = exported.model.generate(
            torch.tensor([merged]),
            attention_mask=torch.ones(1, len(merged), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
        )
        assert theirs[0, len(merged) :].tolist() == list(ours.ids[0])
    assert merged_tokens > 4 * 120 * 0.1


def written(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """2,000 tokens that a model writes at temperature 1.5, as its own settings let it."""
    torch.manual_seed(0)
    rows = torch.tensor([prompt]).repeat(40, 1)
    whole = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        temperature=1.5,
        top_k=0,
        min_new_tokens=50,
        max_new_tokens=50,
        pad_token_id=0,
    )
    new: torch.Tensor = whole[:, len(prompt) :]
    assert new.numel() == 2000
    return new


def test_a_model_never_writes_a_new_id(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = exported.model, exported.merger.merge(exported.prompts(1)[0])
    assert model.generation_config is not None
    assert model.generation_config.suppress_tokens == list(range(8192, 8192 + SPANS))
    assert int(written(model, prompt).max()) < 8192
    # the head's zero rows alone are no mask
    monkeypatch.setattr(model.generation_config, "suppress_tokens", None)
    assert int(written(model, prompt).max()) >= 8192


def test_the_gguf_file_holds_the_same_model(exported: Exported, tmp_path: Path) -> None:
    convert_gguf(exported.directory / "model.gguf", tmp_path)
    back = load_file(tmp_path / "model.safetensors")
    weights = load_file(exported.directory / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    text = "Return the sum of array elements over a given axis.\n\n    it's 2024!"
    ours = AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert ours == exported.umim.backbone.encode(text)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (ModuleForm(unit_positions="preserved"), "unit_positions must be compact"),
        (
            ModuleForm(merge_depth=1, residual="last", unit_positions="preserved"),
            "merge_depth must be 0",
        ),
    ],
    ids=["preserved", "depth"],
)
def test_models_that_are_more_than_rows_are_refused(
    tiny_umim: UMIM, tmp_path: Path, form: ModuleForm, message: str
) -> None:
    umim = checkpoint_of(tiny_umim.backbone, form)
    with pytest.raises(ConfigError, match=message):
        export_model(umim, umim.rules, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_written_for_the_one_engine_that_applies_them(
    tiny_umim: UMIM, tmp_path: Path
) -> None:
    umim, out = checkpoint_of(tiny_umim.backbone, ModuleForm(adapter_rank=2)), tmp_path / "model"
    with pytest.raises(ConfigError, match="OpenVINO cannot apply them"):
        export_model(umim, umim.rules, out, gguf=True)
    gpt2 = checkpoint_of(random_backbone("gpt2"), ModuleForm(adapter_rank=2))
    with pytest.raises(ConfigError, match="adapters are exported of llama, qwen2"):
        export_model(gpt2, gpt2.rules, out)
    assert list(tmp_path.iterdir()) == []
    export_model(umim, umim.rules, out)
    assert len(list(out.glob("*.safetensors"))) == 1  # vLLM reads all of them as weights
    down, up = read_adapters(out)["mlp.gate_proj"]
    own = umim.merged_model.require_module().adapters
    assert own is not None
    assert torch.equal(down, own.down["mlp-gate_proj"])
    assert torch.equal(up, own.up["mlp-gate_proj"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer_fingerprint(tokenizer) == SpanTable.load(out).fingerprint
    with pytest.raises(ValueError, match="`umim_llama`"):  # transformers knows no such model
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(UmimError, match="umim_llama"):
        load_backbone(str(out))
    (out / ADAPTERS).write_bytes((out / ADAPTERS).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="SHA-256"):
        read_adapters(out)


def test_the_command_names_the_one_engine_that_applies_adapters(
    umim: Umim, tiny_umim: UMIM, tmp_path: Path
) -> None:
    merge, out = tmp_path / "merge", tmp_path / "model"
    checkpoint_of(tiny_umim.backbone, ModuleForm(adapter_rank=2)).checkpoint.save(merge)
    shown = umim("export", merge, "--out", out).out
    assert f"Only vLLM with the plugin runs it: vllm serve {out} --tokenizer-mode umim" in shown
    assert "transformers" not in shown


def test_the_document_of_an_export_is_alone_on_stdout(
    umim: Umim, tiny_umim: UMIM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PreTrainedModel.save_pretrained

    def noisy(*given: Any, **options: Any) -> None:
        print("[INFO] a library says something")
        save(*given, **options)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", noisy)
    tiny_umim.checkpoint.save(tmp_path / "merge")
    done = umim("export", tmp_path / "merge", "--out", tmp_path / "model", "--json")
    assert document(done)["out"] == str(tmp_path / "model")


def test_other_spans_are_refused(tiny_umim: UMIM, tmp_path: Path) -> None:
    out, own = tmp_path / "model", tiny_umim.backbone.tokenizer_fingerprint
    with pytest.raises(TokenizerMismatchError):
        export_model(tiny_umim, RuleSet.from_spans([(1, 2)], "f" * 64), out)
    with pytest.raises(TokenizerMismatchError):
        export_model(tiny_umim, RuleSet.from_spans([(1, 99)], own), out)
    with pytest.raises(RuleSetError, match="must hold no special token"):
        export_model(tiny_umim, RuleSet.from_spans([(0, 1)], own), out)
    with pytest.raises(RuleSetError, match="must hold rules"):
        export_model(tiny_umim, RuleSet.from_spans([], own), out)
    with pytest.raises(ConfigError, match="raw_tail"):
        export_model(tiny_umim, tiny_umim.rules, out, raw_tail=-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--out", "new", "--spans", "9"),
            "add --text FILE; got --spans 9",
        ),
        (("--out", "new", "--field", "text"), "add --text FILE; got --field text"),
        (("--text", "README.md", "--out", "new", "--tau", "0"), "tau must be at least 1"),
    ],
)
def test_the_command_refuses_bad_arguments(
    umim: Umim, exported: Exported, arguments: tuple[str, ...], message: str
) -> None:
    result = umim("export", exported.checkpoint, *arguments)
    assert result.code == 1
    assert message in result.err
    assert not Path("new").exists()
