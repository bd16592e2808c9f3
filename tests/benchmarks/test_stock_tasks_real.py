"""SmolLM2-135M on the stock tasks: token reduction against an independent count."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from benchmarks.stock_tasks.__main__ import TASKS
from benchmarks.stock_tasks.task_cells import score_cell
from benchmarks.stock_tasks.task_sides import Models, Side
from support.unit_counts import counted_tokens, read_spans
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.packages.model_cache import model_fault
from umim_core.packages.packaged_model import PACKAGED

HUB = Path(__file__).resolve().parents[3] / "shared" / "hub"
MODEL = "smollm2-135m-instruct"
NAME = "umim-smollm2-135m"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HUB.is_dir(), reason="no local copies of the stock tasks (shared/hub)"),
]


@pytest.fixture(scope="module")
def models() -> Models:
    """The shipped checkpoint on its backbone, float32."""
    place = embedded_path(NAME, "checkpoint")
    if place is None or not (place / "config.json").is_file():
        pytest.skip(f"{NAME} is not built")
    if fault := model_fault(PACKAGED.find(MODEL)):
        pytest.skip(f"{fault}; umim fetch {MODEL}")
    return Models({NAME: Checkpoint.load(NAME)}, MODEL, "float32", 16)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("merge", "raw_tail"), [("prompt", 0), ("prompt", 16), ("all", 0)])
def test_logged_tokens_and_units_equal_an_independent_count(
    models: Models, merge: str, raw_tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from umim_core.evaluation.tasks.task_runs import load_tasks

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    place = embedded_path(NAME, "checkpoint")
    assert place is not None
    spans, tokenizer = read_spans(place / "rules"), load_tokenizer(MODEL)
    model = models.model(Side(merge, NAME, raw_tail))
    with chdir(HUB):
        for name, task in load_tasks(TASKS).items():
            logged = score_cell(model, task, 10)["inputs"]
            pairs = [instance.args for instance in task.instances]
            assert (name, *logged.values()) == (
                name,
                *counted_tokens(pairs, merge, tokenizer, spans, raw_tail),
            )
