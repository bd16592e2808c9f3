"""lm-eval's cache of responses: answers of another checkpoint are never found in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.scoring import Sizes

GREEDY = {"until": ["."], "max_gen_toks": 3, "do_sample": False}
REQUESTS = {
    "loglikelihood": ("the cat sat on the", " mat"),
    "loglikelihood_rolling": ("the cat sat on the mat",),
    "generate_until": ("the cat sat on the", GREEDY),
}


@pytest.fixture(scope="module")
def backbone(backbone_path: Path) -> Backbone:
    return load_backbone(str(backbone_path))


def answers(model: HFLM, place: Path) -> tuple[dict[str, object], int]:
    """Responses through the cache, and the forwards that they took."""
    forwards: list[int] = []
    hook = model.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    cached = CachingLM(model, str(place))
    found = {
        kind: getattr(cached, kind)([Instance(kind, {}, arguments, 0)])[0]
        for kind, arguments in REQUESTS.items()
    }
    hook.remove()
    cached.dbdict.close()
    return found, len(forwards)


def changed(made: Checkpoint, what: str) -> Checkpoint:
    if what == "rules":
        return made.with_contents(made.module, made.rules.take(torch.zeros(5).bool().numpy()))
    module = made.module
    with torch.no_grad():
        next(module.parameters()).add_(0.5)
    return made.with_contents(module, made.rules)


@pytest.mark.parametrize("what", ["rules", "module"])
def test_a_changed_checkpoint_answers_for_itself(
    checkpoint_path: Path, backbone: Backbone, tmp_path: Path, what: str
) -> None:
    place, made = tmp_path / "cache.db", Checkpoint.load(checkpoint_path)
    first, forwards = answers(UmimLM(made, "all", backbone), place)
    again, none = answers(UmimLM(made, "all", backbone), place)
    assert (again, none) == (first, 0) and forwards > 0
    other = changed(Checkpoint.load(checkpoint_path), what)
    fresh, more = answers(UmimLM(other, "all", backbone), place)
    assert more > 0 and fresh["loglikelihood"] != first["loglikelihood"]


@pytest.mark.parametrize(
    "options", [{"merge": "prompt"}, {"merge": "none"}, {"merge": "prompt", "raw_tail": 2}]
)
def test_every_way_of_reading_has_answers_of_its_own(
    checkpoint_path: Path, backbone: Backbone, tmp_path: Path, options: dict[str, object]
) -> None:
    place = tmp_path / "cache.db"
    answers(UmimLM(str(checkpoint_path), "all", backbone), place)
    _, forwards = answers(UmimLM(str(checkpoint_path), backbone=backbone, **options), place)
    assert forwards > 0


KILLED = {
    "loglikelihood": [("the cat sat on the", end) for end in (" mat", " log", " dog", " sea")],
    "loglikelihood_rolling": [(text,) for text in ("the cat sat", "on the mat", "a dog", "by it")],
}


@pytest.mark.parametrize("kind", KILLED)
def test_a_killed_run_resumes_after_its_last_forward(
    checkpoint_path: Path, backbone: Backbone, tmp_path: Path, kind: str
) -> None:
    requests = [Instance(kind, {}, arguments, 0) for arguments in KILLED[kind]]

    def run(name: str, most: int) -> tuple[list[object], int, list[Sizes | None]]:
        """Answers, forwards and sizes; killed before another forward than the first ``most``."""
        forwards: list[int] = []

        def count(*_: object) -> None:
            if len(forwards) == most:
                raise KeyboardInterrupt
            forwards.append(1)

        model = UmimLM(str(checkpoint_path), "all", backbone, batch_size=1)
        cached = CachingLM(model, str(tmp_path / name))
        hook = backbone.model.base_model.register_forward_pre_hook(count)
        try:
            found = getattr(cached, kind)(requests)
        finally:
            hook.remove()
            sizes = [model.sizes_of(request) for request in requests]
            cached.dbdict.close()
        return found, len(forwards), sizes

    whole = run("whole.db", 99)
    with pytest.raises(KeyboardInterrupt):
        run("killed.db", 2)
    resumed = run("killed.db", 99)
    assert resumed == (whole[0], whole[1] - 2, whole[2])
    assert None not in resumed[2]
