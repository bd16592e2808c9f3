"""``umim mine --policy confidence`` against the probabilities of the model itself."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.command_line import Umim
from support.ngram_oracle import grams_of
from umim_core.backbone.backbone import load_backbone
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

LENGTH, SPECIAL = 25, 0


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str, int], PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama", 3).eval()


@pytest.fixture(scope="module")
def backbone(
    tmp_path_factory: pytest.TempPathFactory,
    model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def confident(model: PreTrainedModel, ids: np.ndarray, threshold: float) -> Counter[tuple]:
    """Walk through every segment, token by token."""
    found: Counter[tuple[int, ...]] = Counter()
    for segment in ids.reshape(-1, LENGTH):
        with torch.no_grad():
            chances = model(torch.tensor(segment[None])).logits[0].softmax(-1).numpy()
        run: list[int] = []
        for position in range(1, LENGTH + 1):
            token = int(segment[position]) if position < LENGTH else SPECIAL
            if position < LENGTH and token != SPECIAL and chances[position - 1, token] > threshold:
                run.append(token)
                continue
            if len(run) in ORDERS:
                found[tuple(run)] += 1
            run = []
    return found


@pytest.mark.parametrize(("threshold", "tau"), [(0.04, 1), (0.032, 2)])
def test_rules_are_the_runs_of_confident_tokens(
    umim: Umim, tmp_path: Path, backbone: Path, model: PreTrainedModel, threshold: float, tau: int
) -> None:
    ids = np.random.default_rng(6).integers(0, 12, 40 * LENGTH)
    np.save(tmp_path / "ids.npy", ids.astype(np.uint16))
    how = ("--policy", "confidence", "--backbone", backbone, "--confidence", threshold)
    plain = ("--overlap", "none", "--containment", "keep", "--segment-length", LENGTH, "--json")
    out = tmp_path / "out"
    result = umim("mine", tmp_path / "ids.npy", *how, *plain, "--tau", tau, "--out", out)
    assert result.code == 0, result.err
    rules = RuleSet.load(out)
    want = {run: c for run, c in confident(model, ids, threshold).items() if c >= tau}
    assert len(want) > 5
    assert grams_of(rules) == want
    document = json.loads(result.out)
    assert document["raw"] == document["overlap"] == {}
    assert sum(document["rules"].values()) == len(want)
    origin = rules.origin
    assert (origin.source, origin.tau, origin.min_probability) == ("confidence", tau, threshold)
    assert origin.corpus_digest == hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    assert origin.tokenizer_fingerprint == load_backbone(str(backbone)).tokenizer_fingerprint
