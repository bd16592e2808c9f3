"""The lm-eval model over tiny backbones, against lm-eval's ``hf`` and ``UMIM.generate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.models.huggingface import HFLM

from support.engine_matrix import module_for
from support.merged_models import fresh_model, placed
from support.tiny_models import random_backbone, random_model, tiny_config
from tests.evaluation.conftest import (
    MAX_LENGTH,
    TEXT,
    byte_tokenizer,
    generation,
    likelihoods,
    rolling,
)
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone, wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import UnitPositions
from umim_core.errors import CorpusError, EvaluationError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.scoring import Request
from umim_core.evaluation.sizes import REDUCTIONS
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

PAIRS = [
    ("the cat sat on the", " mat"),
    ("the cat sat on the", " log near the sea"),
    ("the cat sat on the", " dog"),
    ("", " the cat"),
    ("the dog", " sat on the mat and the dog sat"),
    ("by the sea the old cat ", "house"),
    (TEXT * 4, " by the sea"),
]
SHORT = PAIRS[:3] + PAIRS[4:6]
Build = Callable[..., UmimLM]


@pytest.fixture(scope="module")
def build(checkpoint_path: Path) -> Build:
    def make(merge: str | None, batch_size: int = 1, **options: object) -> UmimLM:
        return UmimLM(str(checkpoint_path), merge, device="cpu", batch_size=batch_size, **options)

    return make


def values(scores: list[tuple[float, bool]]) -> list[float]:
    return [value for value, _ in scores]


@pytest.mark.parametrize(
    ("merge", "batch_size"), [("none", 1), ("none", 4), ("prompt", 4), ("all", 4)]
)
def test_without_rules_likelihoods_are_those_of_hf(
    merge: str, batch_size: int, backbone_path: Path
) -> None:
    """With ``merge=none`` exactly; texts are compared in ``test_generation_contract``."""
    most, of_hf = (0.0, batch_size) if merge == "none" else (1e-4, 1)
    hf = HFLM(pretrained=str(backbone_path), device="cpu", batch_size=of_hf)
    backbone = load_backbone(str(backbone_path))
    without = Checkpoint.of(fresh_model(backbone, []))
    ours = UmimLM(without, merge, backbone, batch_size=batch_size)
    found, base = (model.loglikelihood(likelihoods(PAIRS)) for model in (ours, hf))
    assert values(found) == pytest.approx(values(base), abs=most, rel=0)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in base]
    texts = rolling([TEXT * 3, "the cat"])
    found, base = (model.loglikelihood_rolling(texts) for model in (ours, hf))
    assert found == pytest.approx(base, abs=most, rel=0)
    assert ours.realised["token_reduction"] == 0.0


@pytest.mark.parametrize("side", ["none", "base of a comparison", "prompt", "all"])
def test_prompts_of_no_token_are_the_prefix_token_on_every_side(
    build: Build, backbone_path: Path, side: str
) -> None:
    base = build("all", 4, compare="base").base_model() if side.startswith("base") else None
    model, hf = base or build(side, 4), HFLM(pretrained=str(backbone_path), device="cpu")
    prefix = hf.tok_decode([hf.prefix_token_id], skip_special_tokens=False)
    blank = likelihoods(
        [("", " the cat"), (" ", "the cat"), ("", "\n\nthe cat"), ("\n", "\nthe cat")]
    )
    assert values(model.loglikelihood(blank)) == pytest.approx(
        [hf.loglikelihood(blank[i : i + 1])[0][0] for i in (0, 0, 2, 2)]
    )
    assert model.loglikelihood_rolling(rolling(["", "the cat"]))[0] == 0.0
    assert model.loglikelihood_rolling(rolling(["", ""])) == [0.0, 0.0]
    assert model.generate_until(generation(["", ""])) == hf.generate_until(generation([prefix] * 2))
    without = generation([prefix], until=None)
    assert model.generate_until(without) == model.generate_until(generation([prefix], until=[]))
    mixed = model.generate_until(generation(["the dog sat", ""]))
    assert mixed[1] == hf.generate_until(generation([prefix]))[0]


def test_long_texts_are_cut_to_the_first_frequencies_of_longrope() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [8.0] * 2}
    words = byte_tokenizer()
    sizes = {"vocab_size": len(words), "original_max_position_embeddings": 16}
    backbone = random_backbone("phi3", tokenizer=words, rope_scaling=rope, **sizes)
    cut, told = (
        UmimLM(merge="none", backbone=backbone, max_length=most).sharing_contexts()
        for most in (None, 16)
    )
    asked, texts = likelihoods([(TEXT * 4, " mat")]), rolling([TEXT])
    assert cut.loglikelihood(asked) == told.loglikelihood(asked)
    assert cut.loglikelihood_rolling(texts) == told.loglikelihood_rolling(texts)


LONE = "the \ud83d cat"
ASKED_OF = {
    "loglikelihood": lambda text: likelihoods([("the cat", " sat"), (text, " sat")]),
    "loglikelihood of an answer": lambda text: likelihoods([("the cat", text)]),
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
            model.loglikelihood(likelihoods([("the cat", answer)]))
    hook.remove()
    assert forwards == []


def test_the_base_model_may_read_a_context_once_for_all_of_its_answers(build: Build) -> None:
    def scored(model: UmimLM, pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
        read: list[int] = []
        layer = model.model.get_submodule("model.layers.0")
        hook = layer.register_forward_pre_hook(lambda _, args: read.append(args[0][..., 0].numel()))
        answers = model.loglikelihood(likelihoods(pairs))
        hook.remove()
        return values(answers), sum(read)

    def base() -> UmimLM:
        return build("none", 4, max_length=MAX_LENGTH, dtype="float32")

    theirs, _ = scored(base(), PAIRS)
    ours, _ = scored(base().sharing_contexts(), PAIRS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    answers = [(TEXT, f" {word} on the mat") for word in ("cat", "dog", "sea", "house")]
    assert scored(base(), answers)[1] > 2.5 * scored(base().sharing_contexts(), answers)[1]


@pytest.mark.parametrize("positions", ["compact", "preserved"])
def test_all_mode_scores_the_continuation_by_two_stage_accounting(
    checkpoint_path: Path, positions: UnitPositions
) -> None:
    made = Checkpoint.load(checkpoint_path)
    form = made.module.form.model_copy(update={"unit_positions": positions})
    made.module._form = form
    model = UmimLM(made.with_contents(made.module, made.rules), "all", device="cpu", batch_size=4)
    found = values(model.loglikelihood(likelihoods(SHORT)))
    by_positions = {}
    for policy in ("compact", "preserved"):
        merged_model = placed(model.scorer.merged_model, policy)
        pairs = [model._encode_pair(*pair) for pair in SHORT]
        scores = token_log_probs([np.array(a + b) for a, b in pairs], merged_model)
        sums = [float(row[-len(b) :].sum()) for row, (_, b) in zip(scores, pairs, strict=True)]
        by_positions[policy] = sums
    assert found == pytest.approx(by_positions.pop(positions), abs=1e-4)
    [other] = by_positions.values()
    assert max(np.abs(np.subtract(found, other))) > 1e-3


@pytest.mark.parametrize("merge", ["prompt", "all"])
def test_only_the_greedy_continuation_is_reported_as_greedy(build: Build, merge: str) -> None:
    model = build(merge, 16)

    def scores(prefix: list[int]) -> list[tuple[float, bool]]:
        vocabulary = range(len(model.tokenizer))
        asked = [Request(np.array([5, 6]), np.array([*prefix, t])) for t in vocabulary]
        return [(score.log_prob, score.greedy) for score in model.scorer.score(asked, 16)]

    best: list[int] = []
    for _ in range(2):
        found = scores(best)
        likeliest = int(np.argmax(values(found)))
        assert [t for t, (_, greedy) in enumerate(found) if greedy] == [likeliest]
        best.append(likeliest)
    other = (best[0] + 1) % len(model.tokenizer)  # a wrong start is never made good
    assert not any(greedy for _, greedy in scores([other]))


def test_result_files_name_what_decides_answers(checkpoint_path: Path, backbone_path: Path) -> None:
    made, backbone = Checkpoint.load(checkpoint_path), load_backbone(str(backbone_path))
    info = UmimLM(str(checkpoint_path), "prompt", device="cpu").get_model_info()["umim"]
    assert info["backbone_fingerprint"] == made.config.backbone_fingerprint
    assert info["module_digest"] == made.module.digest()
    assert info["rules_digest"] == made.rules.digest
    base = UmimLM(str(checkpoint_path), "none", device="cpu").get_model_info()["umim"]
    assert (base["module_digest"], base["rules_digest"]) == (None, None)
    # the bound that generated tokens merged under
    rules = replace(made.rules, prices=np.ones(len(made.rules), np.float32))
    bounded = made.with_contents(made.module, rules).decoding_under(0.4)

    def recorded(merge: str, *settings: dict[str, object]) -> object:
        model = UmimLM(bounded, merge, backbone)
        for options in settings:
            model.generate_until(generation(["the cat"], max_gen_toks=2, **options))
        return model.get_model_info()["umim"]["decode_max_damage"]

    cheaper: dict[str, object] = {"decode_max_damage": 0.2}
    assert [recorded("all", {}), recorded("all", cheaper)] == [0.4, 0.2]
    assert recorded("all", {}, cheaper, {"decode_max_damage": math.inf}) == [0.4, 0.2, None]
    assert [recorded("prompt", {}), recorded("none", {}), recorded("all")] == [None, None, None]


@pytest.mark.parametrize("merge", ["none", "prompt", "all"])
def test_an_automatic_batch_on_a_cpu_counts_tokens_and_tries_nothing(
    build: Build, merge: str
) -> None:
    model = build(merge, "auto")
    assert model._detect_batch_size() == 2048 // MAX_LENGTH
    assert model._detect_batch_size([(None, [1] * 5, [2])]) == model.max_batch_size == 64
    requests = likelihoods([PAIRS[0], PAIRS[2], ("by the sea", " the cat")])
    forwards: list[int] = []
    hook = model.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    found = model.loglikelihood(requests)
    hook.remove()
    assert len(forwards) == 1
    assert values(found) == pytest.approx(values(build(merge).loglikelihood(requests)), abs=1e-4)


QUESTIONS = ["the cat sat on the", "by the sea the old cat house", "", TEXT]
ANSWERS = [" mat", " log near the sea", " dog", " house by the old"]
MODES: list[dict[str, Any]] = [
    *({"merge": merge, "unit_positions": positions}
      for merge in ("prompt", "all") for positions in ("compact", "preserved")),
    {"method": "selective-context", "target_tr": 0.3},
    {"method": "truncation", "raw_tail": 2},
    {"method": "span-eviction-0"},
    {"method": "streaming-llm-kept-positions"},
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nothing_depends_on_the_batch(family: str, mode: dict[str, Any]) -> None:
    fast = byte_tokenizer()
    config = tiny_config(family, vocab_size=len(fast), max_position_embeddings=64)
    backbone = wrap_backbone(random_model(config), fast, name="tiny")
    ids = backbone.encode(TEXT)
    spans = {tuple(ids[i : i + n]) for n, i in ((2, 1), (3, 4), (2, 8), (4, 12), (2, 0))}
    rules = RuleSet.from_spans(spans, tokenizer_fingerprint=backbone.tokenizer_fingerprint)
    positions = mode.get("unit_positions", "compact")
    merged_model = MergedModel(backbone, module_for(backbone), Matcher(rules))
    made = Checkpoint.of(placed(merged_model, positions))
    options = {name: value for name, value in mode.items() if name != "unit_positions"}
    one, three, eight = (
        UmimLM(made, backbone=backbone, batch_size=size, **{"merge": "prompt", **options})
        for size in (1, 3, 8)
    )
    requests = likelihoods((question, answer) for question in QUESTIONS for answer in ANSWERS)
    expected = one.loglikelihood(requests)
    for model in (three, eight):
        found = model.loglikelihood(requests)
        assert values(found) == pytest.approx(values(expected), abs=2e-5)  # nats of a sum, float32
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    prompts = generation(QUESTIONS, until=["."], max_gen_toks=6)
    assert eight.generate_until(prompts) == one.generate_until(prompts)
    assert eight.realised == one.realised
    texts = rolling([TEXT * 2, "the cat", TEXT])
    expected_texts = one.loglikelihood_rolling(texts)
    assert eight.loglikelihood_rolling(texts) == pytest.approx(expected_texts, abs=1e-4)


SENTENCE = "the cat sat on the mat and the dog sat on the log near the old cat house"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}the cat{% else %}near the{% endif %}"
    " {{ m['content'] }} the cat sat on{% endfor %}"
    "{% if add_generation_prompt %} the cat{% endif %}"
)
CHAT = [
    {"role": "system", "content": "the cat sat on the"},
    {"role": "user", "content": "the cat sat on the"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "the dog sat"},
]
# A prompt, what the checkpoint recommends, None for what one says that says nothing, and options.
READ: list[tuple[Any, tuple[Any, ...] | None, dict[str, Any]]] = [
    *((SENTENCE, own, {}) for own in (("prompt", 4), ("prompt", 0), ("all", 0), ("none", 0), None)),
    (SENTENCE, ("prompt", 4), {"merge": "all"}),
    (SENTENCE, ("all", 0), {"merge": "prompt"}),
    (SENTENCE, ("prompt", 4), {"raw_tail": 0}),
    (CHAT, ("prompt", 2, ("user",)), {}),
    (CHAT, ("prompt", 2, ("user",)), {"raw_tail": 0}),
    (CHAT, ("prompt", 2, ("user",)), {"roles": ["user", "system"]}),
    (CHAT, ("prompt", 2, ("user", "system")), {"merge": "all"}),
    (CHAT, ("prompt", 2, ("user", "system")), {"roles": ["user"]}),
]


@pytest.mark.parametrize(("prompt", "recommended", "said"), READ)
def test_texts_and_chats_are_read_as_generate_reads_them(
    checkpoint_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Any,
    recommended: tuple[Any, ...] | None,
    said: dict[str, Any],
) -> None:
    made = Checkpoint.load(checkpoint_path)
    if recommended is None:
        fields = type(made.config).model_fields
        recommended = fields["merge"].default, fields["raw_tail"].default
        assert recommended == ("prompt", 16)
    made = made.recommending(*recommended)
    caplog.set_level("INFO", "lm_eval.umim")
    named = {**said, "roles": "+".join(said["roles"])} if "roles" in said else said
    model = UmimLM(made, device="cpu", **named)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    text = SENTENCE if prompt is SENTENCE else model.apply_chat_template(prompt)
    options = {"max_new_tokens": 6, "do_sample": False, "logprobs": len(model.tokenizer)}
    ours = UMIM(model.backbone, made).generate(prompt, stop_strings="zz", **options, **said)
    [answer] = model.generate_until(generation([text], until=["zz"], max_gen_toks=6))
    assert str(answer) == ours.text[0]
    assert (model.merge, model.get_model_info()["umim"]["raw_tail"]) == (ours.merge, ours.raw_tail)
    assert f"merge={ours.merge}, raw_tail={ours.raw_tail}" in caplog.text
    if ours.merge == "none":  # which is lm-eval's own model
        return
    saved = (ours.token_reduction, ours.gen_kv_reduction, ours.cumulative_kv_reduction)
    assert answer.reductions == dict(zip(REDUCTIONS, (each[0] for each in saved), strict=True))
    model.forget_sizes()
    [(score, _)] = model.loglikelihood(likelihoods([(text, " sat")]))
    sizes, [spans] = model.question_sizes(None)[None], ours.prompt_spans
    assert sizes.units - 1 == len(ours.prompt_ids[0]) - sum(n - 1 for _, n in spans)
    [word] = model.tok_encode(" sat")
    assert score == pytest.approx(dict(ours.top_logprobs[0][0])[word], abs=1e-5)
    if prompt is CHAT:  # contents alone
        texts = [model.tok_decode(ours.prompt_ids[0][a : a + n]) for a, n in spans]
        assert spans and text.count("the cat") > sum("cat" in span for span in texts)
        system = [a for a, _ in spans if a < len(model.tok_encode("the cat the cat sat"))]
        assert bool(system) == ("system" in said.get("roles", recommended[2]))
