"""Objectives: rows and their kinds, micro-batches, the start's scores, the preference loss."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from support.engine_matrix import from_scratch
from support.merge_modules import give_rows
from support.merged_models import fresh_model
from support.tiny_models import random_backbone
from support.tiny_training import disturb, questions
from support.token_artifacts import write_documents
from support.training_processes import run_ranks
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.control import CONTROLS, fresh_control
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.recipe import DistillConfig, PreferenceConfig
from umim_core.errors import ArtifactError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.rule_rows import RuleRows, frequent_spans
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import spread_rows
from umim_core.text.tokens import IDS as IDS_FILE
from umim_core.training import objectives
from umim_core.training.objectives import (
    PreferenceObjective,
    TrainingRow,
    ending_scores,
    preference_loss,
    training_row,
)
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import batch_indices, planned_items


def preference(
    module: nn.Module, model: MergedModel, train: list[EncodedQuestion], **options: Any
) -> PreferenceObjective:
    """An objective that has begun, with three validation questions."""
    settings = {"beta": 5.0, "batch_size": len(train), **options}
    found = PreferenceObjective(module, model, train, questions(3, seed=2), **settings)
    found.begin()
    return found


def of_module(
    backbone: Backbone, train: list[EncodedQuestion], micro_batch: int | None
) -> PreferenceObjective:
    """A merge module with rows of its own for a rule."""
    model = fresh_model(backbone, [(1, 2), (3, 4)])
    module, rules = model.require_module(), model.require_matcher().rules
    module.rows = RuleRows(frequent_spans(rules, 1), backbone.hidden_size)
    return preference(module, model, train, micro_batch=micro_batch)


def step(objective: PreferenceObjective, indices: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss sum and its gradient by every weight, dense."""
    objective.zero_grad(set_to_none=True)
    total = objective(indices).total
    (total * 0.5).backward()
    found = {name: value.grad for name, value in objective.module.named_parameters()}
    assert all(value is not None for value in found.values())
    return total.item(), {name: value.to_dense() for name, value in found.items()}


def seven() -> list[EncodedQuestion]:
    """Seven questions of which one has no merge."""
    found = questions(7, seed=1)
    found[4] = replace(found[4], context=found[4].context[:5])
    return found


@pytest.mark.parametrize("kind", ["module", *CONTROLS])
@pytest.mark.parametrize("micro_batch", [1, 2, 7, 100])
def test_micro_batches_change_neither_loss_nor_gradient(
    tiny_backbone: Backbone, micro_batch: int, kind: str
) -> None:
    backbone = wrap_backbone(copy.deepcopy(tiny_backbone.model).double(), None)
    indices, results = [6, 0, 4, 2, 1, 3, 5], []
    for size in (None, micro_batch):
        if kind == "module":
            objective = of_module(backbone, seven(), size)
        else:
            control = fresh_control(kind, backbone, seed=5)
            objective = preference(
                control.module, control.merged_model, seven(), batch_size=5, micro_batch=size
            )
        disturb(objective.module)
        results.append(step(objective, indices))
    (loss, wanted), (found, gradients) = results
    assert found == pytest.approx(loss, abs=1e-5) and abs(loss / 7 - math.log(2)) > 1e-2
    for name, value in wanted.items():
        assert kind != "module" or float(value.abs().max()) > 1e-4, name
        torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_no_more_questions_than_a_micro_batch_are_scored_at_once(
    tiny_llama: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(asked: Sequence[EncodedQuestion], merged_model: MergedModel) -> list[Tensor]:
        sizes.append(len(asked))
        return ending_scores(asked, merged_model)

    monkeypatch.setattr(objectives, "ending_scores", counted)
    objective = of_module(tiny_llama, seven(), 2)
    assert sizes == [2] * 5  # of both splits, for the reference
    objective(list(range(7))).total.backward()
    assert sizes[5:] == [2, 2, 2, 1]
    objective.validation_sums(0, 1, limit=8)
    assert sizes[9:] == [2, 1]


def test_the_scores_of_the_start_are_those_of_each_question_alone_and_stay(
    tiny_llama: Backbone,
) -> None:
    objective = of_module(tiny_llama, seven(), None)
    model = objective._merged_model
    with torch.no_grad():
        alone = [ending_scores([q], model)[0] for q in (*seven(), *questions(3, seed=2))]
    scores = objective.start["reference"]
    torch.testing.assert_close(scores, torch.cat(alone), atol=1e-5, rtol=0.0)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    weight, loss, _ = objective.validation_sums(0, 1, limit=8)
    for mean in (loss / weight, objective([0, 1]).total.item() / 2):
        assert mean == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are one
    disturb(objective.module)
    copied = copy.deepcopy(objective)  # its questions are new objects at other addresses
    assert copied.validation_sums(0, 1, 8) == objective.validation_sums(0, 1, 8)
    assert torch.equal(copied([1, 0]).total, objective([1, 0]).total)
    assert abs(copied([1, 0]).total.item() / 2 - math.log(2)) > 1e-3


def test_a_short_run_scores_the_questions_that_it_will_ask_and_no_others(
    tiny_llama: Backbone,
) -> None:
    config = PreferenceConfig(max_steps=3, batch_size=4, learning_rate=0.1)
    asked, first = planned_items(config, 7, 101), batch_indices(7, 0, 4, 101)
    assert len(asked) == 12 and {*first} < {*asked} < {*range(101)}
    model = fresh_model(tiny_llama, [(1, 2)])
    given = model.require_module(), model, questions(101, 0)
    short = preference(*given, batch_size=4, items={"train": asked, "valid": spread_rows(3, 2)})
    whole = preference(*given, batch_size=4)
    assert (len(short.start["reference"]), len(whole.start["reference"])) == (42, 312)
    torch.testing.assert_close(short(first).total, whole(first).total, atol=1e-5, rtol=0.0)
    assert short.validation_sums(0, 1, 2) == pytest.approx(whole.validation_sums(0, 1, 2))
    with pytest.raises(KeyError):
        short([index for index in range(101) if index not in asked][:1])


def score_on_rank(rank: int, folder: Path) -> None:
    model = fresh_model(random_backbone("llama", eos_token_id=0), [(1, 2)])
    scores = preference(model.require_module(), model, questions(21, 0), batch_size=4).start
    np.save(folder / f"scores-{rank}.npy", scores["reference"].numpy())


@pytest.mark.full
def test_two_ranks_get_the_bits_of_one_process(tmp_path: Path) -> None:
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    run_ranks(pair, 2, score_on_rank, pair)
    run_ranks(alone, 1, score_on_rank, alone)
    expected = np.load(alone / "scores-0.npy")
    assert all(np.array_equal(np.load(pair / f"scores-{k}.npy"), expected) for k in (0, 1))


MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
IDS = np.array([1, 2, 3, 4, 5, 6] * 6 + [7])


def row_at(index: int, size: int = len(IDS), **shares: float) -> TrainingRow:
    """A row of a split whose rows are all alike."""
    rows = TokenRows.of_rows([IDS[:size].tolist()] * (index + 1), [size] * (index + 1))
    return training_row(rows, index, MATCHER, **shares)


def first_state(row: TrainingRow) -> int:
    """The raw position from which all units have loss."""
    first = int(row.states.argmax())
    assert row.states[first:].all()
    return first


def kind_of(row: TrainingRow) -> str:
    half = len(IDS) // 2
    if first_state(row) == half and (row.cut[1][row.cut[0] < half] > 1).any():
        return "copy" if np.array_equal(row.ids[:half], row.ids[half:]) else "prompt"
    return "prompt" if first_state(row) else "merged"


def test_shares_are_those_asked_for_and_a_row_keeps_its_kind() -> None:
    assert {tuple(row_at(index).cut[1]) for index in range(50)} == {(2, 3, 1) * 6 + (1,)}
    rows = [row_at(i, prompt=0.3, copy=0.2) for i in range(500)]
    kinds = Counter(map(kind_of, rows))
    assert abs(kinds["prompt"] - 150) < 45 and abs(kinds["copy"] - 100) < 45
    again = [row_at(i, prompt=0.3, copy=0.2) for i in range(100)]
    assert [kind_of(row) for row in again] == [kind_of(row) for row in rows[:100]]
    assert [first_state(row_at(0, size, copy=0.999)) for size in (15, 16)] == [0, 8]


def test_the_loss_begins_behind_the_merged_part_of_copies_and_prompts() -> None:
    row = row_at(0, copy=0.999)
    half = len(IDS) // 2
    assert row.ids.tolist() == IDS[:half].tolist() * 2
    assert row.cut[1].tolist() == [2, 3, 1] * 3 + [1] * half
    assert first_state(row) == half
    row = row_at(3, prompt=0.999)
    starts, lengths = row.cut
    first = first_state(row)
    draw = np.random.default_rng([objectives._STREAM, 3])
    draw.random()
    assert first == draw.integers(len(IDS) // 4, len(IDS) - len(IDS) // 4)
    assert (lengths[starts >= first] == 1).all()
    assert (lengths[starts < first] > 1).any()
    drawn = {first_state(row_at(index, prompt=0.999)) for index in range(300)}
    assert drawn == {*range(9, 28)}  # all between a quarter and three of 37 tokens
    with pytest.raises(ValidationError, match="add up to 1 at most"):
        DistillConfig(max_steps=1, prompt_rows=0.6, copy_rows=0.6)


@pytest.mark.parametrize("most", [0, 3, 100])
def test_all_states_of_a_reply_and_some_before_it_have_loss(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "PROMPT_STATES", most)
    reply = 30
    rows = TokenRows.of_parts([IDS.tolist()] * 2, [((0, 24),)] * 2, [reply, reply])
    (tmp_path / "rows").mkdir()
    rows.save(tmp_path / "rows")
    (row, other) = (training_row(TokenRows.load(tmp_path / "rows", 8), n, MATCHER) for n in (0, 1))
    starts, lengths = row.cut
    ends = starts + lengths - 1
    counted = ends[row.states[ends]]
    before = counted[counted < reply - 1].tolist()
    assert len(before) == min(most, 17)  # 12 merged units, 5 raw ones
    assert counted[counted >= reply - 1].tolist() == list(range(reply - 1, len(IDS)))
    assert most != 3 or not np.array_equal(row.states, other.states)  # its index draws them


ROWS = TokenRows.of_rows([[1, 2, 1, 2], [], [1, 2]], [3, 0, 2])
PARTS = TokenRows.of_parts([[1, 2] * 4, [1, 2], [1, 2]], [((1, 4), (4, 6)), (), ((0, 2),)])


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    ROWS.save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows", 9)
    assert [back.row(i).tolist() for i in range(len(back))] == [[1, 2, 1, 2], [], [1, 2]]
    assert [back.parts_of(i) for i in range(3)] == [((0, 3),), ((0, 0),), ((0, 2),)]
    assert isinstance(back.ids, np.ndarray) and not back.ids.flags.owndata, "memory-mapped"


def test_a_corpus_is_read_from_its_files_and_never_copied(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", *np.split(np.arange(23), [6, 12, 18]))
    np.save(tmp_path / "ids.npy", np.arange(23, dtype=np.uint32))
    for name in ("corpus", "ids.npy"):
        rows = TokenRows.load(tmp_path / name, 4)
        found = [rows.row(i).tolist() for i in range(len(rows))]
        assert found == np.arange(20).reshape(5, 4).tolist()
    with pytest.raises(ArtifactError, match=r"must be an \.npy array"):
        TokenRows.load(tmp_path / "gone", 4)


@pytest.mark.parametrize(("altered", "size"), [(-1, 23), (23, 23), (1 << 18, None)])
def test_an_altered_token_file_is_refused_before_its_ids_are_read_by(
    tmp_path: Path, altered: int, size: int | None
) -> None:
    write_documents(tmp_path / "corpus", np.arange(23))
    ids = np.load(tmp_path / "corpus" / IDS_FILE)
    ids[6] = altered
    np.save(tmp_path / "corpus" / IDS_FILE, ids)
    rows = TokenRows.load(tmp_path / "corpus", 4, *([] if size is None else [size]))
    assert rows.row(0).tolist() == [0, 1, 2, 3]
    with pytest.raises(ArtifactError, match=f"ids must lie between 0 and .*; got row 1: {altered}"):
        rows.row(1)


@pytest.mark.parametrize(
    ("rows", "index", "lengths"),
    [
        (ROWS, 0, [2, 1, 1]),
        (ROWS, 1, []),
        (ROWS, 2, [2]),
        (PARTS, 0, [1, 1, 2, 2, 1, 1]),
        (PARTS, 1, [1, 1]),
        (PARTS, 2, [2]),
    ],
)
def test_tokens_outside_of_the_parts_stay_raw(
    rows: TokenRows, index: int, lengths: list[int]
) -> None:
    starts, found = rows.segment(index, Matcher(RuleSet.from_spans([(1, 2)])))
    assert found.tolist() == lengths
    assert starts.tolist() == (np.cumsum(lengths) - lengths).tolist()


# The packed preference loss against an unpacked one that runs one forward per answer

RULES = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


def fresh_module(seed: int) -> MergeModule:
    module = MergeModule(16).double()
    module.initialise(1.0, torch.Generator().manual_seed(seed))
    return module


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


ASKED = [
    EncodedQuestion(ids(1, 2, 3, 4, 5, 6), (ids(7, 8, 9), ids(10), ids(2, 3), ids(11, 12)), 2),
    EncodedQuestion(ids(20, 6, 7, 8, 9, 1), (ids(2, 1, 2), ids(13, 14)), 0),
    EncodedQuestion(ids(21), (ids(1, 2, 3), ids(4), ids(5, 6)), 1),
]
SPANS = Matcher(RuleSet.from_spans(RULES))


def oracle_loss(
    backbone: Backbone, policy: MergeModule, reference: MergeModule, beta: float
) -> torch.Tensor:
    """The paper's listing, with loops."""

    def score(module: MergeModule, context: np.ndarray, ending: np.ndarray) -> torch.Tensor:
        before = [[context, *([token] for token in ending[:n])] for n in range(len(ending))]
        rows = from_scratch(backbone, module, [(SPANS, parts) for parts in before])
        log_probs = torch.stack([row for row, _ in rows]).log_softmax(-1)
        return log_probs.gather(1, torch.tensor(ending)[:, None]).mean()

    per_question = []
    for question in ASKED:
        gains = [
            score(policy, question.context, ending)
            - score(reference, question.context, ending).detach()
            for ending in question.endings
        ]
        right = gains.pop(question.gold)
        pairs = [-torch.log(torch.sigmoid(beta * (right - wrong))) for wrong in gains]
        per_question.append(sum(pairs) / len(pairs))
    return sum(per_question) / len(per_question)


def packed_loss(
    backbone: Backbone, policy: MergeModule, reference: MergeModule, beta: float
) -> torch.Tensor:
    with torch.no_grad():
        fixed = ending_scores(ASKED, MergedModel(backbone, reference, SPANS))
    scores = ending_scores(ASKED, MergedModel(backbone, policy, SPANS))
    return preference_loss(scores, fixed, [q.gold for q in ASKED], beta=beta)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_loss_and_gradient_equal_the_unpacked_ones(kind: str) -> None:
    backbone = random_backbone(kind, torch.float64, vocab_size=31, initializer_range=0.02)
    reference = fresh_module(2)
    losses, gradients = [], []
    for loss_of in (packed_loss, oracle_loss):
        policy = give_rows(fresh_module(1), RULES[:1])
        loss = loss_of(backbone, policy, reference, 3.0)
        loss.backward()
        fixed = (*backbone.model.parameters(), *reference.parameters())
        assert all(parameter.grad is None for parameter in fixed)
        losses.append(loss.item())
        gradients.append([p.grad.to_dense() for p in policy.parameters()])
    # Llama's RMSNorm computes in float32 whatever the weights are.
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
        assert found.abs().max() > 0


def test_the_loss_of_extreme_scores() -> None:
    scores = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = preference_loss([scores], [torch.zeros(2)], [0], beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert torch.isfinite(scores.grad).all()
