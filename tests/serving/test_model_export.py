"""Exported models, files of their spans, and prompts merged by these: equal to our engine; what is
altered, torn or of another form is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.engines import ENGINES
from support.command_line import Umim, console, document, run_main
from support.faulty_disk import PAGE
from support.ngram_oracle import units_of
from support.processes import ROOT, output_of
from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import tokenizer_fingerprint
from umim_core.checkpoint.checkpoint import Checkpoint, fresh_module
from umim_core.config.form import Merge, ModuleForm
from umim_core.errors import (
    ArtifactError,
    ConfigError,
    GenerationError,
    RuleSetError,
    TokenizerMismatchError,
    UmimError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.model_export import export_model
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.span_files import (
    ADAPTERS,
    RECORD,
    TABLE,
    TOKENIZER,
    read_adapters,
    read_record,
)
from umim_core.store.artifacts import sha256_file
from umim_core.text.roles import USER

SPANS = 300


@dataclass(frozen=True)
class Exported:
    """A checkpoint, what ``umim export`` made of it, and prompts that hold its spans."""

    checkpoint: Path
    directory: Path

    @cached_property
    def merger(self) -> PromptMerger:
        return PromptMerger.load(self.directory)

    @cached_property
    def umim(self) -> UMIM:
        """Our engine with the exported spans as rules."""
        own = UMIM.from_pretrained(self.checkpoint, dtype="float32")
        return UMIM(own.backbone, replace(own.checkpoint, rules=self.merger.rules))

    @cached_property
    def model(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.directory)
        return model.eval()

    def prompts(self, count: int, tokens: int = 120) -> list[list[int]]:
        """Raw ids of real texts."""
        pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
        ids = self.umim.backbone.encode("\n".join(pages))
        starts = np.linspace(0, len(ids) - tokens, count).astype(int)
        return [ids[start : start + tokens] for start in starts]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A model that the command exported, next to our engine."""
    folder = tmp_path_factory.mktemp("exported")
    made = checkpoint_of(load_backbone("umim-docs-llama"), ModuleForm(), [(300, 301)])
    with torch.no_grad():  # what training would have moved
        generator = torch.Generator().manual_seed(1)
        bias = made.checkpoint.module.norm_o.bias
        bias.normal_(0.0, made.backbone.embedding_std / 3, generator=generator)
    made.checkpoint.save(folder / "merge")
    options = ("--text", ROOT / "docs" / "*.md", "--dtype", "float32", "--gguf", "--spans", SPANS)
    run_main("export", folder / "merge", "--out", folder / "model", *options)
    return Exported(folder / "merge", folder / "model")


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def checkpoint_of(backbone: Any, form: ModuleForm, spans: Any = ((1, 2), (3, 4, 5))) -> UMIM:
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint or None)
    module = fresh_module(backbone, rules, form, 0)
    merged_model = MergedModel(backbone, module, Matcher(rules))
    return UMIM(backbone, Checkpoint.of(merged_model))


def test_the_directory_is_a_plain_model_of_more_rows(exported: Exported) -> None:
    config = json.loads((exported.directory / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (8192 + SPANS, False)
    assert (len(exported.merger.rules), exported.merger.raw_tail) == (SPANS, 16)
    weights = load_file(exported.directory / "model.safetensors")
    assert len(list(exported.directory.glob("*.safetensors"))) == 1  # vLLM reads all of them
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in exported.directory.iterdir())
    own = exported.umim.backbone
    assert torch.equal(weights["model.embed_tokens.weight"][:8192], own.embedding_weight)
    assert torch.equal(weights["lm_head.weight"][:8192], own.head_weight)
    assert not weights["lm_head.weight"][8192:].any()
    tokenizer = AutoTokenizer.from_pretrained(exported.directory)
    assert tokenizer_fingerprint(tokenizer) == exported.merger.rules.origin.tokenizer_fingerprint


def greedy(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """16 tokens that transformers writes behind a prompt."""
    rows = torch.tensor([ids])
    mask = torch.ones_like(rows)
    whole = model.generate(rows, attention_mask=mask, max_new_tokens=16, do_sample=False)
    return list(map(int, whole[0, len(ids) :]))


@torch.no_grad()
def test_transformers_computes_what_our_engine_does(exported: Exported) -> None:
    umim, merged_tokens = exported.umim, 0
    for ids in exported.prompts(4):
        merged = exported.merger.merge(ids)
        merged_tokens += len(ids) - len(merged)
        packed = umim.merged_model.pack([np.array(ids)], raw_tail=16)
        wanted = umim.backbone.head(umim.backbone.hidden(umim.merged_model.embed(packed)))[0]
        found = exported.model(torch.tensor([merged])).logits[0, :, : umim.backbone.vocab_size]
        assert float((found - wanted).abs().max()) <= 1e-4
        ours = umim.generate([ids], merge="prompt", raw_tail=16, max_new_tokens=16, do_sample=False)
        assert greedy(exported.model, merged) == list(ours.ids[0])
    assert merged_tokens > 4 * 120 * 0.1


def written(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """600 tokens that a model writes at temperature 1.5, as its own settings let it."""
    torch.manual_seed(0)
    rows = torch.tensor([prompt]).repeat(40, 1)
    sampled: Any = {"do_sample": True, "temperature": 1.5, "top_k": 0, "pad_token_id": 0}
    lengths: Any = {"min_new_tokens": 15, "max_new_tokens": 15}
    whole = model.generate(rows, attention_mask=torch.ones_like(rows), **sampled, **lengths)
    new: torch.Tensor = whole[:, len(prompt) :]
    assert new.numel() == 600
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


OPENVINO = ENGINES / "openvino" / "bin" / "python"


@pytest.mark.skipif(not OPENVINO.exists(), reason="needs `tools/engine.sh openvino` (0.3 GB)")
def test_openvino_writes_the_ids_that_transformers_does(exported: Exported, tmp_path: Path) -> None:
    """It reads the GGUF file, and no other floats than float16."""
    umim = UMIM.from_pretrained(exported.checkpoint, dtype="float16")
    export_model(umim, exported.umim.rules, tmp_path / "model", gguf=True)
    merger = PromptMerger.load(tmp_path / "model")
    prompts = [merger.merge(ids) for ids in exported.prompts(4)]
    assert sum(map(len, prompts)) < 4 * 120 * 0.9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # neither engine stops early
    wanted = [greedy(model, ids) for ids in prompts]
    asked = json.dumps({"prompts": prompts, "tokens": 16})
    script, model_file = ROOT / "tests/support/openvino_greedy.py", tmp_path / "model/model.gguf"
    printed = output_of(OPENVINO, script, model_file, stdin=asked)
    assert json.loads(printed.splitlines()[-1]) == wanted


DEEP = ModuleForm(merge_depth=1, residual="last", unit_positions="preserved")
GGUF, OUT = {"gguf": True}, dict[str, Any]()


@pytest.mark.parametrize(
    ("family", "form", "spans", "options", "error", "message"),
    [
        ("", ModuleForm(unit_positions="preserved"), None, OUT, ConfigError,
         "unit_positions must be compact"),
        ("", DEEP, None, OUT, ConfigError, "merge_depth must be 0"),
        ("", ModuleForm(adapter_rank=2), None, GGUF, ConfigError, "OpenVINO cannot apply them"),
        ("gpt2", ModuleForm(adapter_rank=2), None, OUT, ConfigError, "exported of llama, qwen2"),
        ("", ModuleForm(), [(1, 99)], OUT, TokenizerMismatchError, "tokenizer"),
        ("", ModuleForm(), [(0, 1)], OUT, RuleSetError, "must hold no special token"),
        ("", ModuleForm(), [], OUT, RuleSetError, "must hold rules"),
        ("", ModuleForm(), None, {"raw_tail": -1}, ConfigError, "raw_tail"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(
    tiny_umim: UMIM, tmp_path: Path, family: str, form: ModuleForm, spans: Any,
    options: dict[str, Any], error: type[UmimError], message: str,
) -> None:  # fmt: skip
    umim = checkpoint_of(random_backbone(family) if family else tiny_umim.backbone, form)
    rules = umim.rules
    if spans is not None:
        rules = RuleSet.from_spans(spans, umim.backbone.tokenizer_fingerprint)
    with pytest.raises(error, match=message):
        export_model(umim, rules, tmp_path / "model", **options)
    with pytest.raises(TokenizerMismatchError):
        export_model(tiny_umim, RuleSet.from_spans([(1, 2)], "f" * 64), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recommended", "asked", "tail"),
    [
        (("prompt", 0), None, 0),
        (("all", 0), None, 0),
        (("prompt", 4), None, 4),
        (("none", 0), None, 16),
        (("prompt", 4), 0, 0),
    ],
)
def test_an_export_has_the_raw_tail_that_its_checkpoint_recommends(
    tiny_umim: UMIM, tmp_path: Path, recommended: tuple[Merge, int], asked: int | None, tail: int
) -> None:
    umim = UMIM(tiny_umim.backbone, tiny_umim.checkpoint.recommending(*recommended))
    export_model(umim, umim.rules, tmp_path / "model", raw_tail=asked)
    assert PromptMerger.load(tmp_path / "model").raw_tail == tail


def test_adapters_are_written_for_the_one_engine_that_applies_them(
    umim: Umim, tiny_umim: UMIM, tmp_path: Path
) -> None:
    adapted, out = checkpoint_of(tiny_umim.backbone, ModuleForm(adapter_rank=2)), tmp_path / "model"
    adapted.checkpoint.save(tmp_path / "merge")
    shown = umim("export", tmp_path / "merge", "--out", out, "--dtype", "float32").out
    assert f"Only vLLM with the plugin runs it: vllm serve {out} --tokenizer-mode umim" in shown
    assert "transformers" not in shown
    assert len(list(out.glob("*.safetensors"))) == 1  # vLLM reads all of them as weights
    down, up = read_adapters(out)["mlp.gate_proj"]
    own = adapted.merged_model.require_module().adapters
    assert own is not None  # its checkpoint is bfloat16
    assert torch.equal(down, own.down["mlp-gate_proj"].bfloat16().float())
    assert torch.equal(up, own.up["mlp-gate_proj"].bfloat16().float())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert PromptMerger.load(out, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    with pytest.raises(ValueError, match="`umim_llama`"):  # transformers knows no such model
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(UmimError, match="umim_llama"):
        load_backbone(str(out))
    (out / ADAPTERS).write_bytes((out / ADAPTERS).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="SHA-256"):
        read_adapters(out)


@pytest.mark.parametrize("pages", [1, 2, 4])  # in 4 the tokenizer fits, the weights do not
def test_a_disk_that_fills_is_named(
    tiny_umim: UMIM, small_disk: Callable[[int], Path], pages: int
) -> None:
    out = small_disk(pages * PAGE) / "model"
    with pytest.raises(ArtifactError, match="must be writable; got No space left"):
        export_model(tiny_umim, tiny_umim.rules, out)
    assert list(out.parent.iterdir()) == []


def test_an_export_loads_no_deepspeed_and_says_nothing_of_it(
    umim: Umim, tiny_umim: UMIM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    tiny_umim.checkpoint.save(tmp_path / "merge")
    done = umim("export", tmp_path / "merge", "--out", tmp_path / "model", "--json")
    assert document(done)["out"] == str(tmp_path / "model")
    assert "deepspeed" not in sys.modules and done.err == ""


Spans = list[tuple[int, ...]]
TABLE_SPANS: Spans = [(1, 2), (3, 4), (1, 2, 3), (4, 5, 6, 7)]
LONG_SPANS = [*TABLE_SPANS, (1, 2, 3, 4, 5, 6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TOKENIZER).write_text("{}")
    PromptMerger(RuleSet.from_spans(TABLE_SPANS, "a" * 64), 50, 16).write(tmp_path)
    return tmp_path


def change(folder: Path, without: Sequence[str] = (), **fields: Any) -> None:
    record = json.loads((folder / RECORD).read_text()) | fields
    left = {name: value for name, value in record.items() if name not in without}
    (folder / RECORD).write_text(json.dumps(left))


@pytest.mark.parametrize("spans", [TABLE_SPANS, LONG_SPANS])
def test_what_was_written_is_read(folder: Path, spans: Spans) -> None:
    PromptMerger(RuleSet.from_spans(spans, "a" * 64), 50, 16).write(folder)
    table = PromptMerger.load(folder, tokenizer_fingerprint="a" * 64)
    assert [tuple(r) for rows in table.rules.ids_by_order.values() for r in rows.tolist()] == spans
    assert table.rules.longest == max(map(len, spans))
    assert (table.vocab_size, table.raw_tail) == (50, 16)
    assert "roles" not in json.loads((folder / RECORD).read_text())  # as exports before them
    for roles in (USER, ("user", "tools")):
        replace(table, roles=roles).write(folder)
        assert PromptMerger.load(folder).roles == roles


def other_table(ids: Any, lengths: Any, kind: Any = np.int8) -> Any:
    """Put other tensors with their digest."""
    tensors: Any = {"ids": np.array(ids, np.int32), "lengths": np.array(lengths, kind)}

    def put(folder: Path) -> None:
        save_file(tensors, folder / TABLE)
        files = json.loads((folder / RECORD).read_text())["files"]
        change(folder, files=files | {TABLE: sha256_file(folder / TABLE)})

    return put


SPOILT: list[tuple[Any, type[UmimError], str]] = [
    (lambda folder: change(folder, format=2), ArtifactError, "format must be at most"),
    (lambda folder: change(folder, format=True), ArtifactError, "format must be an integer"),
    (lambda folder: change(folder, without=("policy",)), ArtifactError, "policy must be given"),
    (lambda folder: change(folder, vocab_size=0), ArtifactError, "must describe the spans"),
    (lambda folder: change(folder, spans=5), ArtifactError, "must hold 5 spans of ids below 50"),
    (lambda folder: change(folder, vocab_size=7), ArtifactError, "4 spans of ids below 7"),
    (lambda folder: (folder / RECORD).unlink(), ArtifactError, RECORD),
    (lambda folder: (folder / TABLE).unlink(), ArtifactError, TABLE),
    (lambda folder: (folder / TABLE).write_bytes((folder / TABLE).read_bytes() + b" "),
     ArtifactError, f"{TABLE} must have the SHA-256"),
    (other_table([[k, 9, -1, -1] for k in (2, 1, 3, 4)], [2] * 4), ArtifactError, "spans .*sorted"),
    (other_table([[1, 2, 3, -1], *[[k, 9, -1, -1] for k in range(3)]], [3, 2, 2, 2]), ArtifactError,
     "spans .*sorted"),
    (other_table([[1, 2, -1, -1]] * 4, [2] * 4), ArtifactError, "spans .*sorted"),
    (other_table([[k, 9, 7, -1] for k in range(4)], [2] * 4), ArtifactError, "spans .*sorted"),
    (other_table([[*range(17)]] * 4, [17] * 4), ArtifactError, "must hold spans; got a rule must"),
    *((other_table(*tensors), ArtifactError, "must hold (4 )?spans") for tensors in (
          ([[1, 2]] * 4, [2.0] * 4, np.float32), ([[1, 2]] * 4, [[2]] * 4), ([1] * 4, [2] * 4),
          ([[[1], [2]]] * 4, [2] * 4), ([[1, 2]] * 4, [3] * 4), ([[1, 2]] * 4, [-1] * 4),
          ([[1, 2]] * 4, [2] * 3),
      )),
    (lambda folder: change(folder, tokenizer_fingerprint="b" * 64), TokenizerMismatchError,
     "tokenizer"),
    (lambda folder: (folder / TOKENIZER).write_text('{"version": "1.0"}'), TokenizerMismatchError,
     "must be the tokenizer"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "error", "message"), SPOILT)
def test_what_is_no_export_is_refused(
    folder: Path, spoil: Any, error: type[UmimError], message: str
) -> None:
    assert read_record(folder).spans == len(TABLE_SPANS)
    spoil(folder)
    with pytest.raises(error, match=message):
        PromptMerger.load(folder, tokenizer_fingerprint="a" * 64)


VOCAB = 1000


def merger(spans: Spans, raw_tail: int = 0, vocab_size: int = VOCAB) -> PromptMerger:
    return PromptMerger(RuleSet.from_spans(spans), vocab_size, raw_tail)


def oracle(
    ids: Sequence[int], spans: Spans, ranges: Sequence[tuple[int, int]], raw_tail: int
) -> list[int]:
    """Longest span first, left to right, in a dictionary of spans in the order of their ids."""
    ordered = sorted(set(spans), key=lambda span: (len(span), span))
    known = {span: VOCAB + place for place, span in enumerate(ordered)}
    merged, behind = list[int](), 0
    for first, end in ranges:
        part = ids[first : max(first, end - raw_tail)]
        merged += ids[behind:first]
        merged += [known.get(tuple(part[at : at + n]), part[at]) for at, n in units_of(part, known)]
        behind = first + len(part)
    return [*merged, *ids[behind:]]


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle_on_random_texts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        alphabet = int(rng.integers(2, 40))
        sizes = rng.integers(2, int(rng.choice([5, 17])), 50)
        spans = [tuple(rng.integers(0, alphabet, n).tolist()) for n in sizes]
        ids = rng.integers(0, alphabet, rng.integers(0, 80)).tolist()
        ids = [*ids, *(token for span in spans[:4] for token in span)]
        cuts = sorted(rng.integers(0, len(ids) + 1, 2 * int(rng.integers(1, 4))).tolist())
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        raw_tail = int(rng.integers(0, 6))
        own = merger(spans, raw_tail)
        merged = own.merge(ids, ranges)
        assert merged == oracle(ids, spans, ranges, raw_tail)
        assert own.merge(ids) == oracle(ids, spans, [(0, len(ids))], raw_tail)
        assert own.expand(merged) == ids


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    PromptMerger(RuleSet.from_spans([(1, 2)]), VOCAB, 0).write(tmp_path)
    probe = (
        "import sys\nfrom pathlib import Path\n"
        "from umim_core.serving.prompt_merger import PromptMerger\n"
        "import umim_core.text.chat_parts\n"
        f"print(PromptMerger.load(Path({str(tmp_path)!r})).merge([1, 2]))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert output_of(sys.executable, "-c", probe).splitlines() == ["[1000]", "[]"]


def test_a_prompt_has_known_ids_and_ranges_in_order() -> None:
    own, array = merger([(1, 2)]), np.array([(0, 2), (3, 4)])
    assert own.merge([1, 2, 1, 2], array) == [VOCAB, 1, 2]  # type: ignore[arg-type]
    assert len({own, own, merger([(1, 2)])}) == 2
    with pytest.raises(GenerationError, match="ids must lie between 0 and 999"):
        own.merge([1, VOCAB])
    with pytest.raises(GenerationError, match="in order and apart"):
        own.merge([1, 2, 3], [(0, 2), (1, 3)])
