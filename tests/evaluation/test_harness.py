"""The lm-eval model over a tiny backbone on disk, against lm-eval's ``hf``; its result files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from support.merged_models import fresh_model
from tests.evaluation.conftest import oracle_context
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import (
    CorpusError,
    EvaluationError,
)
from umim_core.evaluation.harness import UmimLM
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.ruleset import RuleSet

TEXT = "the cat sat on the mat and the dog sat on the log near the old cat house by the sea "
MAX_LENGTH = 48
PAIRS = [
    ("the cat sat on the", " mat"),
    ("the cat sat on the", " log near the sea"),
    ("the cat sat on the", " dog"),
    ("", " the cat"),
    ("the dog", " sat on the mat and the dog sat"),
    ("by the sea the old cat ", "house"),
    (TEXT * 4, " by the sea"),
]


Build = Callable[..., UmimLM]


@pytest.fixture(scope="module")
def build(checkpoint_path: Path) -> Build:
    def make(merge: str | None, batch_size: int = 1, **options: object) -> UmimLM:
        return UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=batch_size, **options)

    return make


def requests(pairs: list[tuple[str, str]] = PAIRS) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def rolling(texts: list[str]) -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (t,), i) for i, t in enumerate(texts)]


def generation(prompts: list[str], **options: object) -> list[Instance]:
    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, **options}
    return [Instance("generate_until", {}, (p, settings), i) for i, p in enumerate(prompts)]


def checkpoint_of(backbone: Backbone, spans: list[tuple[int, ...]]) -> Checkpoint:
    return Checkpoint.of(fresh_model(backbone, RuleSet.from_spans(spans)))


def without_rules(backbone_path: Path, tmp_path: Path) -> str:
    checkpoint_of(load_backbone(str(backbone_path)), []).save(tmp_path / "empty")
    return str(tmp_path / "empty")


@pytest.mark.parametrize("batch_size", [1, 4])
def test_merge_none_equals_hf_exactly(build: Build, backbone_path: Path, batch_size: int) -> None:
    hf = HFLM(pretrained=str(backbone_path), device="cpu", batch_size=batch_size)
    ours = build("none", batch_size)
    assert ours.loglikelihood(requests()) == hf.loglikelihood(requests())
    texts = rolling([TEXT * 3, "the cat"])
    assert ours.loglikelihood_rolling(texts) == hf.loglikelihood_rolling(texts)
    prompts = generation(["the cat sat", "on the", "near"])
    assert ours.generate_until(prompts) == hf.generate_until(prompts)


@pytest.mark.parametrize("side", ["none", "base of a comparison", "prompt", "all"])
def test_prompts_of_no_token_are_the_prefix_token_on_every_side(
    build: Build, backbone_path: Path, side: str
) -> None:
    base = build("all", 4, compare="base").base_model() if side.startswith("base") else None
    model, hf = base or build(side, 4), HFLM(pretrained=str(backbone_path), device="cpu")
    prefix = hf.tok_decode([hf.prefix_token_id], skip_special_tokens=False)
    blank = requests([("", " the cat"), (" ", "the cat"), ("", "\n\nthe cat"), ("\n", "\nthe cat")])
    scores = [score for score, _ in model.loglikelihood(blank)]
    assert scores == pytest.approx([hf.loglikelihood(blank[i : i + 1])[0][0] for i in (0, 0, 2, 2)])
    assert model.loglikelihood_rolling(rolling(["", "the cat"]))[0] == 0.0
    assert model.loglikelihood_rolling(rolling(["", ""])) == [0.0, 0.0]
    assert model.generate_until(generation(["", ""])) == hf.generate_until(generation([prefix] * 2))
    without = generation([prefix], until=None)
    assert model.generate_until(without) == model.generate_until(generation([prefix], until=[]))
    mixed = model.generate_until(generation(["the dog sat", ""]))
    assert mixed[1] == hf.generate_until(generation([prefix]))[0]


LONE = "the \ud83d cat"
ASKED_OF = {
    "loglikelihood": lambda text: requests([("the cat", " sat"), (text, " sat")]),
    "loglikelihood of an answer": lambda text: requests([("the cat", text)]),
    "loglikelihood_rolling": lambda text: rolling(["the cat", text]),
    "generate_until": lambda text: generation(["the cat", text]),
    "generate_until of a stop": lambda text: generation(["the cat"], until=["\n", text]),
}


@pytest.mark.parametrize("merge", ["none", "prompt", "all"])
@pytest.mark.parametrize("kind", ASKED_OF)
def test_texts_that_are_none_are_refused_before_a_forward(
    build: Build, kind: str, merge: str
) -> None:
    model, forwards = build(merge), []
    hook = model.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    ask = getattr(model, kind.partition(" ")[0])
    with pytest.raises(CorpusError, match=r"must not hold lone surrogates; got 'the \\ud83d cat'"):
        ask(ASKED_OF[kind](LONE))
    for stops in ([3], 3, [None], {"a": 1}):
        with pytest.raises(CorpusError, match="stops of a task must be strings"):
            model.generate_until(generation(["the cat"], until=stops))
    for answer in ("", "the cat " * MAX_LENGTH):
        with pytest.raises(EvaluationError, match=r"must hold 1 to 48 tokens; got .* of request 0"):
            model.loglikelihood(requests([("the cat", answer)]))
    hook.remove()
    assert forwards == []


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_empty_rules_give_the_base_models_likelihoods(
    merge: str, backbone_path: Path, tmp_path: Path
) -> None:
    hf = HFLM(pretrained=str(backbone_path), device="cpu", batch_size=1)
    ours = UmimLM(without_rules(backbone_path, tmp_path), merge, device="cpu", batch_size=4)
    for (mine, my_greedy), (base, base_greedy) in zip(
        ours.loglikelihood(requests()), hf.loglikelihood(requests()), strict=True
    ):
        assert mine == pytest.approx(base, abs=1e-4)
        assert my_greedy == base_greedy
    texts = rolling([TEXT * 3, "the cat"])
    expected = hf.loglikelihood_rolling(texts)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, abs=1e-4)
    assert ours.token_reduction == 0.0


def test_the_base_model_may_read_a_context_once_for_all_of_its_answers(build: Build) -> None:
    def scored(model: UmimLM, pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
        read: list[int] = []
        layer = model.model.get_submodule("model.layers.0")
        hook = layer.register_forward_pre_hook(lambda _, args: read.append(args[0][..., 0].numel()))
        answers = model.loglikelihood(requests(pairs))
        hook.remove()
        return [value for value, _ in answers], sum(read)

    def base() -> UmimLM:
        return build("none", 4, max_length=MAX_LENGTH, dtype="float32")

    theirs, _ = scored(base(), PAIRS)
    ours, _ = scored(base().sharing_contexts(), PAIRS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    answers = [(TEXT, f" {word} on the mat") for word in ("cat", "dog", "sea", "house")]
    assert scored(base(), answers)[1] > 2.5 * scored(base().sharing_contexts(), answers)[1]


def test_context_mode_matches_the_context_alone(build: Build) -> None:
    model = build("prompt", 4)
    pairs = PAIRS[:3] + PAIRS[4:6]
    expected = [
        oracle_context(model.scorer.merged_model, *model._encode_pair(*pair)) for pair in pairs
    ]
    found = [value for value, _ in model.loglikelihood(requests(pairs))]
    assert found == pytest.approx(expected, abs=1e-4)
    assert model.context_token_reduction > model.token_reduction > 0


def test_all_mode_scores_the_continuation_by_two_stage_accounting(build: Build) -> None:
    model = build("all", 4)
    pairs = PAIRS[:3] + PAIRS[4:6]
    expected = []
    for pair in pairs:
        context, ending = model._encode_pair(*pair)
        [scores] = token_log_probs([np.array(context + ending)], model.scorer.merged_model)
        expected.append(float(scores[-len(ending) :].sum()))
    found = [value for value, _ in model.loglikelihood(requests(pairs))]
    assert found == pytest.approx(expected, abs=1e-4)


def test_unit_positions_are_those_of_the_checkpoint(checkpoint_path: Path) -> None:
    made = Checkpoint.load(checkpoint_path)
    config = made.config.model_copy(update={"unit_positions": "preserved"})
    model = UmimLM(replace(made, config=config), "all", device="cpu")
    scorer, (context, ending) = model.scorer, model._encode_pair(*PAIRS[1])
    [(found, _)] = model.loglikelihood(requests(PAIRS[1:2]))
    preserved, compact = (
        token_log_probs(
            [np.array(context + ending)],
            replace(scorer.merged_model, unit_positions=policy),
        )[0][-len(ending) :].sum()
        for policy in ("preserved", "compact")
    )
    assert found == pytest.approx(float(preserved), abs=1e-4)
    assert abs(found - float(compact)) > 1e-3


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_only_the_greedy_continuation_is_reported_as_greedy(build: Build, merge: str) -> None:
    model = build(merge, 16)

    def scores(prefix: list[int]) -> list[tuple[float, bool]]:
        vocabulary = range(len(model.tokenizer))
        return model._loglikelihood_tokens([(None, [5, 6], [*prefix, t]) for t in vocabulary], True)

    best: list[int] = []
    for _ in range(2):
        found = scores(best)
        likeliest = int(np.argmax([value for value, _ in found]))
        assert [t for t, (_, greedy) in enumerate(found) if greedy] == [likeliest]
        best.append(likeliest)
    other = (best[0] + 1) % len(model.tokenizer)  # a wrong start is never made good
    assert not any(greedy for _, greedy in scores([other]))


def test_long_contexts_lose_leading_units_not_tokens(build: Build) -> None:
    model = build("prompt")
    context, ending = model._encode_pair(*PAIRS[-1])
    kept, units = model.scorer.fit(np.array(context), 20)
    assert len(context) > MAX_LENGTH and units == 20 and len(kept) > 20
    starts, _ = model.scorer.merged_model.matcher.segment(np.array(context))
    assert len(context) - len(kept) in starts.tolist()
    assert len(model.scorer.merged_model.matcher.segment(kept)[0]) == 20
    fitted, _ = model.scorer.fit(np.array(context), MAX_LENGTH - len(ending) + 1)
    expected = oracle_context(model.scorer.merged_model, fitted.tolist(), ending)
    assert model.loglikelihood(requests(PAIRS[-1:]))[0][0] == pytest.approx(expected, abs=1e-4)


def test_only_merge_all_merges_generated_tokens(backbone_path: Path) -> None:
    backbone = load_backbone(str(backbone_path))
    prompt = "the cat sat on the"
    options = GenerateOptions(max_new_tokens=2)
    ids = backbone.encode(prompt)
    [row] = Engine(MergedModel.without_merging(backbone)).generate([ids], options).rows
    checkpoint = checkpoint_of(backbone, [row.ids])
    units = {}
    for merge in ("prompt", "all"):
        model = UmimLM(checkpoint, merge, backbone)
        model.generate_until(generation([prompt]))
        units[merge] = model.scorer.total.units
    assert units["all"] < units["prompt"]


def test_result_files_name_backbone_module_and_rules_by_digest(
    checkpoint_path: Path,
) -> None:
    made = Checkpoint.load(checkpoint_path)
    info = UmimLM(str(checkpoint_path), "prompt", device="cpu").get_model_info()["umim"]
    assert info["backbone_fingerprint"] == made.config.backbone_fingerprint
    assert info["module_digest"] == made.module.digest()
    assert info["rules_digest"] == made.rules.digest
    base = UmimLM(str(checkpoint_path), "none", device="cpu").get_model_info()["umim"]
    assert (base["module_digest"], base["rules_digest"]) == (None, None)


def test_result_files_carry_the_bound_that_generated_tokens_merged_under(
    checkpoint_path: Path, backbone_path: Path
) -> None:
    made, backbone = Checkpoint.load(checkpoint_path), load_backbone(str(backbone_path))
    rules = replace(made.rules, prices=np.ones(len(made.rules), np.float32))
    bounded = made.with_contents(made.module, rules).decoding_under(0.4)

    def recorded(merge: str, *asked: dict[str, object]) -> object:
        model = UmimLM(bounded, merge, backbone)
        for number, options in enumerate(asked):
            settings = {"until": ["\n"], "max_gen_toks": 2, "do_sample": False, **options}
            model.generate_until([Instance("generate_until", {}, ("the cat", settings), number)])
        return model.get_model_info()["umim"]["decode_max_damage"]

    cheaper: dict[str, object] = {"decode_max_damage": 0.2}
    assert [recorded("all", {}), recorded("all", cheaper)] == [0.4, 0.2]
    assert recorded("all", {}, cheaper, {"decode_max_damage": math.inf}) == [0.4, 0.2, None]
    assert [recorded("prompt", {}), recorded("none", {}), recorded("all")] == [None, None, None]


@pytest.mark.parametrize("merge", ["none", "prompt", "all"])
def test_an_automatic_batch_on_a_cpu_counts_tokens_and_tries_nothing(
    checkpoint_path: Path, merge: str
) -> None:
    model = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size="auto")
    assert model._detect_batch_size() == 2048 // MAX_LENGTH
    assert model._detect_batch_size([(None, [1] * 5, [2])]) == model.max_batch_size == 64
    asked = requests([PAIRS[0], PAIRS[2], ("by the sea", " the cat")])
    forwards: list[int] = []
    hook = model.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    found = model.loglikelihood(asked)
    hook.remove()
    one = UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=1)
    assert len(forwards) == 1
    assert [x for x, _ in found] == pytest.approx(
        [x for x, _ in one.loglikelihood(asked)], abs=1e-4
    )
