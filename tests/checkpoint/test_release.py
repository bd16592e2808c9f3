"""Releases of the paper's authors: equal units and logits, refusals of everything else."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.pickle_bomb import PickleBomb
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.release import read_release
from umim_core.errors import UmimError

NAMES = {2: "bigrams", 3: "trigrams", 4: "fourgrams"}
RULES = {2: [[3, 4], [9, 9]], 3: [[5, 6, 7]], 4: [[10, 11, 12, 13], [3, 4, 5, 8]]}
TEXT = [9, 3, 4, 5, 6, 7, 10, 11, 12, 13, 3, 4, 5, 8, 9, 9, 9, 14]
UNITS = [[9], [3, 4], [5, 6, 7], [10, 11, 12, 13], [3, 4, 5, 8], [9, 9], [9], [14]]


def their_module(size: int) -> nn.ModuleDict:
    """The modules of a release, under its names of tensors."""
    made = {
        name: nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size))
        for name in ("token_processor", "output_proj")
    }
    pool = nn.ModuleDict(made)
    pool.register_parameter("query", nn.Parameter(torch.randn(4, size // 4)))
    return nn.ModuleDict({"attention_pool": pool})


def their_surrogate(module: nn.ModuleDict, span: Tensor) -> Tensor:
    """What a release computes of one span [N, d], written out head by head."""
    pool = module["attention_pool"]
    projected, heads = pool["token_processor"](span), []
    for head, query in enumerate(pool.query):
        part = projected[:, head * len(query) : (head + 1) * len(query)]
        heads.append(F.softmax(part @ query / len(query) ** 0.5, dim=0) @ part)
    return pool["output_proj"](torch.cat(heads))


@pytest.fixture
def backbone(tiny_checkpoint: Path) -> Backbone:
    return load_backbone(str(tiny_checkpoint.parent / "backbone"))


@pytest.fixture
def module(backbone: Backbone) -> nn.ModuleDict:
    torch.manual_seed(0)
    module = their_module(backbone.hidden_size)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.fixture
def release(tmp_path: Path, module: nn.ModuleDict) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    torch.save(module.state_dict(), folder / "merge_module.pt")
    for n, rows in RULES.items():
        torch.save(torch.tensor(rows, dtype=torch.int32), folder / f"filtered_{NAMES[n]}_tensor.pt")
    files = {str(n): f"filtered_{name}_tensor.pt" for n, name in NAMES.items()}
    config = {"merge_weights": "merge_module.pt", "rule_files": files, "num_heads": 4}
    (folder / "runtime_config.json").write_text(json.dumps(config))
    return folder


def test_units_and_logits_are_those_of_the_release(
    release: Path, module: nn.ModuleDict, backbone: Backbone, tmp_path: Path
) -> None:
    read_release(release, backbone)[0].save(tmp_path / "made")
    ours = UMIM.from_pretrained(tmp_path / "made", backbone=backbone.name, dtype="float32")
    units = ours.merged_model.require_matcher().segment(np.array(TEXT))
    starts, lengths = (part.tolist() for part in units)
    assert [TEXT[a : a + n] for a, n in zip(starts, lengths, strict=True)] == UNITS
    with torch.no_grad():
        embeddings = [backbone.embed(torch.tensor(unit)) for unit in UNITS]
        rows = [e[0] if len(e) == 1 else their_surrogate(module, e) for e in embeddings]
        theirs = backbone.model(inputs_embeds=torch.stack(rows)[None]).logits[0, -1]
    words = [backbone.decode([token]) for token in range(5, 20)]
    context = " ".join(backbone.decode([token]) for token in TEXT)
    scores = ours.score([context], [words])[0]
    assert torch.tensor(scores) == pytest.approx(theirs.log_softmax(-1)[5:20], abs=1e-5)


def test_rules_with_special_tokens_are_counted(release: Path, backbone: Backbone) -> None:
    special = min(backbone.special_ids)
    rows = torch.tensor([[special, 4], [6, 7]], dtype=torch.int32)
    torch.save(rows, release / "filtered_bigrams_tensor.pt")
    checkpoint, count = read_release(release, backbone)
    assert (count, len(checkpoint.rules)) == (1, 4)


def save(name: str, make: Callable[[Tensor], object]) -> Callable[[Path], None]:
    """Replace a file of a release by what is made of 16 ones."""
    return lambda folder: torch.save(make(torch.ones(4, 4)), folder / name)


def packed(folder: Path) -> None:
    with zipfile.ZipFile(folder / "merge_module.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 4096)


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (save("merge_module.pt", lambda _: PickleBomb(Path("ran"))), "torch.save wrote"),
        (save("merge_module.pt", lambda t: {"query": t}), "nine tensors"),
        (save("merge_module.pt", lambda t: [t]), "nine tensors"),
        (packed, "packed entries"),
        (written("merge_module.pt", "version https://git-lfs"), "git lfs pull"),
        (lambda folder: (folder / "merge_module.pt").unlink(), "must be a file"),
        (save("filtered_bigrams_tensor.pt", lambda t: t.int()), r"\[rules, 2\]"),
        (save("filtered_bigrams_tensor.pt", lambda t: t[:, :2]), r"\[rules, 2\]"),
        (save("filtered_bigrams_tensor.pt", lambda t: -t[:, :2].int()), "the vocabulary"),
        (save("filtered_bigrams_tensor.pt", lambda t: 9999 * t[:, :2].int()), "the vocabulary"),
        (written("runtime_config.json", "[]"), "must name"),
        (written("runtime_config.json", '{"rule_files": {"5": "x"}}'), "must name"),
        (written("runtime_config.json", '{"merge_weights": "../../x"}'), "inside its root"),
        (written("runtime_config.json", '{"num_heads": 3}'), "num_heads"),
    ],
)
def test_anything_else_is_refused_and_nothing_runs(
    release: Path,
    backbone: Backbone,
    damage: Callable[[Path], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(release)
    monkeypatch.chdir(release)
    with pytest.raises(UmimError, match=message):
        read_release(release, backbone)
    assert not Path("ran").exists()
