"""Merge checkpoints: round trip, and refusal of what does not fit, is torn or is hostile."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.command_line import Umim, console
from support.merge_modules import FORMS, give_rows, module_of
from support.merged_models import fresh_model, random_merged_model
from support.pickle_bomb import PickleBomb
from support.tiny_models import tiny_model, word_tokenizer
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.checkpoint.checkpoint_index import (
    artifact_root,
    own_checkpoint,
    own_checkpoints,
    own_name,
    record_checkpoint,
)
from umim_core.checkpoint.next_steps import after_mining
from umim_core.embedded.assets import embedded_names
from umim_core.errors import (
    ArtifactError,
    BackboneMismatchError,
    CheckpointError,
    ConfigError,
    TokenizerMismatchError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import read_json, write_json, write_manifest
from umim_core.text.reading import Reading

SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


def make(backbone: Backbone, form: str = "paper", **rules: str) -> Checkpoint:
    made = fresh_model(backbone, RuleSet.from_spans(SPANS, **rules), seed=5, **FORMS[form])
    return Checkpoint.of(made, {"steps": 3, "loss": 1.5, "note": "a"})


def with_rows(backbone: Backbone) -> Checkpoint:
    """A checkpoint whose first two rules have rows."""
    module = give_rows(module_of("paper", backbone.hidden_size), SPANS[:2])
    return Checkpoint.of(MergedModel(backbone, module, Matcher(RuleSet.from_spans(SPANS))))


@pytest.fixture
def saved(tiny_llama: Backbone, tmp_path: Path) -> Path:
    make(tiny_llama).save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def sign(directory: Path, schema: int = 2) -> None:
    """Write a manifest that fits whatever the directory holds now."""
    write_manifest(directory, kind="checkpoint", schema=schema, body={})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [False, True])
def test_round_trip(tiny_backbone: Backbone, form: str, rows: bool, tmp_path: Path) -> None:
    fingerprint = tiny_backbone.tokenizer_fingerprint
    checkpoint = make(tiny_backbone, form, tokenizer_fingerprint=fingerprint)
    if rows:
        module = give_rows(checkpoint.module, SPANS[:2])
        checkpoint = checkpoint.with_contents(module, checkpoint.rules)
    checkpoint.save(tmp_path / "x")
    before = torch.get_rng_state()
    back = Checkpoint.load(tmp_path / "x")
    assert torch.equal(torch.get_rng_state(), before)  # weights are not drawn first
    assert back.config == checkpoint.config and back.config.rule_rows == 2 * rows
    assert back.config.training == {"steps": 3, "loss": 1.5, "note": "a"}
    assert back.rules.digest == checkpoint.rules.digest
    assert back.module.digest() == checkpoint.module.digest()
    ids, lengths = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]]), torch.tensor([2, 3, 4])
    given = (tiny_backbone.embed(ids), lengths, ids)
    assert torch.equal(back.module(*given), checkpoint.module(*given))
    assert not back.module.training
    assert not any(parameter.requires_grad for parameter in back.module.parameters())
    back.check_backbone(tiny_backbone)


@pytest.mark.parametrize("name", embedded_names())
def test_a_shipped_checkpoint_is_written_again_as_it_was_read(name: str, tmp_path: Path) -> None:
    folders = tmp_path / "again", resolve_checkpoint(name)
    Checkpoint.load(name).save(folders[0])
    assert len({(folder / "config.json").read_bytes() for folder in folders}) == 1
    weights = (load_file(folder / "model.safetensors") for folder in folders)
    torch.testing.assert_close(*weights, rtol=0, atol=0, check_dtype=False)  # stored in bfloat16


def test_holds_exactly_the_stable_files_and_no_backbone_weights(saved: Path) -> None:
    assert {p.relative_to(saved).as_posix() for p in saved.rglob("*") if p.is_file()} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "rules/rules.parquet",
        "rules/manifest.json",
    }
    assert (saved / "model.safetensors").stat().st_size < 4 * (2 * 16 * 16 + 7 * 16) + 2048


@pytest.mark.parametrize("rules_know", [True, False])
def test_another_vocabulary_of_the_same_size_and_another_architecture_are_refused(
    tiny_llama: Backbone, rules_know: bool
) -> None:
    words = ["<eos>", *(f"w{i}" for i in range(1, 32))]
    words[3], words[4] = words[4], words[3]
    other = wrap_backbone(tiny_model(), word_tokenizer(words))
    assert other.fingerprint == tiny_llama.fingerprint
    known = {"tokenizer_fingerprint": tiny_llama.tokenizer_fingerprint} if rules_know else {}
    checkpoint = make(tiny_llama, **known)
    checkpoint.check_backbone(tiny_llama)
    message = rf"got one of .*{other.tokenizer_fingerprint[:12]}"
    with pytest.raises(TokenizerMismatchError, match=message):
        checkpoint.check_backbone(other)
    with pytest.raises(BackboneMismatchError, match="Load the backbone it was trained for"):
        checkpoint.check_backbone(wrap_backbone(tiny_model("gpt2", 0), None))


def rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return what changes the weights of a checkpoint."""

    def write(saved: Path) -> None:
        weights = load_file(saved / "model.safetensors")
        change(weights)
        save_file(weights, saved / "model.safetensors")

    return write


def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return rewritten(lambda weights: weights.update({name: change(weights[name])}))


def header(declared: int) -> Callable[[Path], None]:
    def write(saved: Path) -> None:
        data = (saved / "model.safetensors").read_bytes()
        (saved / "model.safetensors").write_bytes(struct.pack("<Q", declared) + data[8:])

    return write


def grown(saved: Path) -> None:
    with (saved / "model.safetensors").open("r+b") as stream:
        stream.truncate(1 << 26)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda saved: write_json(
        saved / "config.json", {**dict(read_json(saved / "config.json")), **changes}
    )


def text(content: str) -> Callable[[Path], None]:
    return lambda saved: (saved / "config.json").write_text(content)


SHAPES = "must hold the tensors"
TYPES = "floating-point weights of 16 bits or more"
FORM = "describe a merge checkpoint; got .*"
PAIRS, UP = "adapters of rank 2, a pair per linear map", "adapters.up.mlp-down_proj"
REFUSED = {
    "another form": (config(kind="linear"), SHAPES),
    "huge size": (config(hidden_size=1 << 16), SHAPES),  # 34 GB of weights, never allocated
    "missing tensor": (rewritten(lambda weights: weights.pop("query")), SHAPES),
    "more tensors": (rewritten(lambda weights: weights.update(extra=torch.zeros(1))), SHAPES),
    "another shape": (weight("query", lambda _: torch.zeros(4, 5)), SHAPES),
    "no tensors": (rewritten(lambda weights: weights.clear()), SHAPES),
    **{
        f"{value}": (
            weight("linear_o.weight", lambda old, value=value: old.float().fill_(value)),
            r"finite weights; got \['linear_o\.weight'\]",
        )
        for value in (float("nan"), float("inf"), float("-inf"))
    },
    **{
        f"{kind}": (weight("query", lambda old, kind=kind: old.to(kind)), TYPES)
        for kind in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2)
    },
    **{
        f"header {declared}": (header(declared), "must be safetensors")
        for declared in (1 << 20, 1 << 31, 1 << 40, 2**63, 2**64 - 1)
    },
    "far larger": (grown, "bytes; got 67108864 bytes"),
    "no spans": (rewritten(lambda weights: weights.pop("rows.spans")), SHAPES),
    "spans of nothing": (weight("rows.spans", torch.zeros_like), "rule rows of spans"),
    "no ids": (weight("rows.spans", lambda old: old.float()), "spans of int32"),
    "another rule": (
        weight("rows.spans", lambda old: old.index_fill(0, torch.tensor([0]), 1)),
        "own rules alone; got 1 of 2",
    ),
    "infinite row": (weight("rows.table", lambda old: old / 0), r"got \['rows\.table'\]"),
    "adapters: half a pair": (rewritten(lambda weights: weights.pop(UP)), PAIRS),
    "adapters: another rank": (weight(UP, lambda old: old[:, :1].clone()), SHAPES),
    "adapters: one layer": (weight(UP, lambda old: old[0].clone()), PAIRS),
    "adapters: none": (
        rewritten(lambda weights: [weights.pop(n) for n in list(weights) if "adapters" in n]),
        PAIRS,
    ),
    **{
        f"{name}={str(value)[:9]}": (config(**{name: value}), f"{FORM}{name}")
        for name, value in (
            *(("hidden_size", value) for value in (0, 1 << 17, "many")),
            *(("raw_tail", value) for value in (-1, 10**30)),
            *(("decode_max_damage", "inf"), ("merge", "none")),
            *(("num_heads", -1), ("depth", 2)),
            *(("adapter_rank", 10**30), ("backbone", None), ("training", {"loss": [1]})),
            ("code", "import os"),
        )
    },
    "nested": (text("[" * 200_000), "readable JSON"),
    "digits": (text('{"raw_tail": ' + "9" * 5000 + "}"), "readable JSON"),
    "surrogate": (text('{"backbone": "\\ud800"}'), "readable JSON"),
    "BOM": (text("\ufeff{}"), "readable JSON"),
    "list": (text("[]"), "describe a merge checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(tiny_llama: Backbone, tmp_path: Path, name: str) -> None:
    matcher = Matcher(RuleSet.from_spans(SPANS))
    adapted = Checkpoint.of(random_merged_model(tiny_llama, matcher, 1, 2))
    made = adapted if name.startswith("adapters:") else with_rows(tiny_llama)
    made.save(tmp_path / "x")
    assert Checkpoint.load(tmp_path / "x").config.adapter_rank == made.config.adapter_rank
    change, message = REFUSED[name]
    change(tmp_path / "x")
    sign(tmp_path / "x")
    with pytest.raises((CheckpointError, ArtifactError), match=message):
        Checkpoint.load(tmp_path / "x")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_precision_are_read(saved: Path, kind: torch.dtype) -> None:
    weight("query", lambda old: old.to(kind))(saved)
    sign(saved)
    assert Checkpoint.load(saved).module.query.dtype == torch.float32


def test_a_pickle_renamed_to_safetensors_does_nothing(saved: Path, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    pickle.loads(pickle.dumps(PickleBomb(fired)))  # noqa: S301  the bomb works
    fired.unlink()
    (saved / "model.safetensors").write_bytes(pickle.dumps(PickleBomb(fired)))
    sign(saved)
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be safetensors"):
        Checkpoint.load(saved)
    assert not fired.exists()


@pytest.mark.parametrize("name", ["no-such-checkpoint", "umim-docs-lama"])
def test_an_unknown_name_lists_the_embedded_ones(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    names = [name, *embedded_names()]
    assert len(names) == 3 and all(found in str(caught.value) for found in names)
    hint = "Did you mean 'umim-docs-llama'?" if "lama" in name else "Check the name"
    assert hint in str(caught.value)


def test_rows_stay_with_their_rules(tiny_llama: Backbone, tmp_path: Path) -> None:
    checkpoint = with_rows(tiny_llama)
    kept = checkpoint.with_contents(checkpoint.module, RuleSet.from_spans([(3, 4, 5), (8, 9)]))
    matcher = Matcher(kept.rules)  # what trains has the rows of all rules
    Checkpoint.of(MergedModel(tiny_llama, checkpoint.module, matcher)).save(tmp_path / "x")
    for made in (kept, Checkpoint.load(tmp_path / "x")):
        assert (made.config.rule_rows, made.module.rows.spans.tolist()) == (1, [[3, 4, 5, -1]])
        assert torch.equal(made.module.rows.table, checkpoint.module.rows.table[1:])
    assert (checkpoint.config.rule_rows, len(checkpoint.module.rows)) == (2, 2)
    none = checkpoint.with_contents(checkpoint.module, RuleSet.from_spans([(8, 9)]))
    assert (none.config.rule_rows, none.module.rows) == (0, None)


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def stage(root: Path, tiny_checkpoint: Path) -> Path:
    """A finished stage that holds a checkpoint."""
    directory = root / "distill" / f"0123abcd{'e' * 56}"
    shutil.copytree(tiny_checkpoint, directory / "checkpoint")
    return directory


def test_an_address_has_a_local_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UMIM_SCRATCH", raising=False)
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    one = artifact_root()
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/other")
    assert one.is_absolute() and one.parent == artifact_root().parent and one != artifact_root()
    monkeypatch.setenv("UMIM_SCRATCH", str(tmp_path))
    assert artifact_root() == tmp_path.resolve()
    monkeypatch.setenv("UMIM_ROOT", "file:///tmp/umim")
    with pytest.raises(ConfigError, match="Give the path of a directory"):
        artifact_root()


def test_a_command_that_stores_nothing_refuses_an_address(
    monkeypatch: pytest.MonkeyPatch, umim: Umim
) -> None:
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    done = umim("prune", "umim-docs-llama", "text.txt", "--keep-all")
    assert done.code == 1 and "Name a directory with --out" in done.err
    assert "secret" not in done.err


def test_a_name_is_fit_for_the_command_line() -> None:
    name = own_name("novels", "llama tau 5 greedy+drop, learned positions", "WT + FT")
    assert name == "novels/llama-tau-5-greedy-drop-learned-positions/wt-ft"


def test_a_recorded_checkpoint_is_found_by_its_name(root: Path, stage: Path, umim: Umim) -> None:
    record_checkpoint(root, "novels/llama-tau-5/wt", stage / "checkpoint")
    assert resolve_checkpoint("novels/llama-tau-5/wt") == stage / "checkpoint"
    assert umim("path", "novels/llama-tau-5/wt").out.strip() == str(stage / "checkpoint")
    listed = umim("path").out.splitlines()
    assert listed[-1].split() == ["novels/llama-tau-5/wt", str(stage / "checkpoint")]


def test_runs_that_give_one_name_at_once_all_record_it(root: Path, stage: Path) -> None:
    def record(_: int) -> Path:
        return record_checkpoint(root, "novels/wt", stage / "checkpoint")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(record, range(64)))) == 1
    assert own_checkpoints() == {"novels/wt": stage / "checkpoint"}


def test_names_are_listed_while_another_is_given(
    root: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def late(at: str | Path) -> Any:
        if str(at).endswith(".umim"):  # what the record is written in has gone by now
            os.rmdir(at)
        return scan(at)

    record_checkpoint(root, "novels/wt", stage / "checkpoint")
    (root / "checkpoints" / "novels" / ".wt.json.0123456789abcdef.umim").mkdir()
    monkeypatch.setattr(os, "scandir", late)
    assert own_checkpoints() == {"novels/wt": stage / "checkpoint"}


def test_names_survive_a_move_of_the_root(
    root: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_checkpoint(root, "a/b/wt", stage / "checkpoint")
    moved = root.rename(root.with_name("moved"))
    monkeypatch.setenv("UMIM_ROOT", str(moved))
    assert own_checkpoints() == {"a/b/wt": moved / stage.relative_to(root) / "checkpoint"}


def test_the_digits_that_a_log_shows_find_the_checkpoint(stage: Path) -> None:
    assert resolve_checkpoint(stage.name[:12]) == stage / "checkpoint"
    shutil.copytree(stage, stage.with_name(stage.name[:63] + "f"))
    assert own_checkpoint(stage.name[:12]) is None  # two begin so


@pytest.mark.parametrize("name", ["../distill", "a/../../distill", ".."])
def test_a_name_cannot_climb_out_of_the_index(stage: Path, name: str) -> None:
    assert own_checkpoint(name) is None


def test_a_line_names_few_texts_and_how_they_are_read() -> None:
    for count in (8, 9):
        texts = [f"a {n}.log" for n in range(count)]
        *_, line = after_mining(Path("out"), None, texts, Reading(kind="text"))
        named = texts if count == 8 else ["TEXTS"]
        words = ["umim", "train", "MODEL", *named, "--kind", "text", "--rules", "out"]
        assert shlex.split(line) == [*words, "--out", "out-trained"]
