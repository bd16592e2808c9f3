"""Results of lm-eval as they go into a tracking store: figures, settings and samples."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from support.tracked_runs import files_of, runs_of
from tasks.tracking.harness_results import HarnessResults, find_results, log_results
from tasks.tracking.tracker import Tracker, fit_name, flatten
from umim_core.errors import EvaluationError

DATE = "2026-03-04T05-06-07.000008"
PROMPT = "Question: was it née?\nAnswer:"
CONTENT: dict[str, Any] = {
    "results": {
        "tiny": {
            "alias": "tiny",
            "sample_len": 2,
            "acc,none": 0.5,
            "acc_stderr,none": 0.25,
            "exact_match,strict-match": 0.0,
            "pass@1,none": 1.0,
            "acc_difference_stderr,none": "N/A",
        }
    },
    "config": {
        "model": "umim",
        "model_args": "checkpoint=umim-docs-llama,token=s3cret",
        "limit": 2.0,
        "umim": {"module_digest": "m" * 64, "rules_digest": "r" * 64, "merge": "prompt"},
    },
    "n-shot": {"tiny": 0},
    "configs": {"tiny": {"dataset_path": "none"}},
    "date": 1_772_600_767.5,
    "total_evaluation_time_seconds": "1.5",
}
SAMPLES = [
    {
        "doc_id": number,
        "doc": {"question": "was it née?"},
        "target": "1",
        "arguments": {
            "gen_args_0": {"arg_0": PROMPT, "arg_1": " yes"},
            "gen_args_1": {"arg_0": PROMPT, "arg_1": " no"},
        },
        "filtered_resps": [["-1.5", "False"]],
        "acc": float(number),
    }
    for number in range(2)
]
NO_FILES = ["a/b", "", "a\0b", "x" * 300, "\ud800"]


def write_results(folder: Path, content: dict[str, Any] = CONTENT) -> Path:
    """Write one call's files into a folder, and return the folder."""
    inner = folder / "model"
    inner.mkdir(parents=True, exist_ok=True)
    (inner / f"results_{DATE}.json").write_text(json.dumps(content), encoding="utf-8")
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in SAMPLES)
    (inner / f"samples_tiny_{DATE}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def results(tmp_path: Path) -> HarnessResults:
    [found] = find_results(write_results(tmp_path))
    return found


def test_figures_settings_and_samples_are_those_of_the_files(results: HarnessResults) -> None:
    figures = {"acc": 0.5, "acc_stderr": 0.25, "exact_match.strict-match": 0.0, "pass@1": 1.0}
    assert results.metrics() == {f"tiny/{name}": value for name, value in figures.items()}
    params = flatten(results.params())
    assert params["model_args.checkpoint"] == "umim-docs-llama"
    assert params["umim.module_digest"] == "m" * 64 and params["umim.merge"] == "prompt"
    assert params["n-shot.tiny"] == "0" and "s3cret" not in params.values()
    table = results.table("tiny")
    assert table["prompt"] == [PROMPT, PROMPT] and table["acc"] == [0.0, 1.0]
    assert set(table) == {"prompt", *SAMPLES[0]}
    assert json.loads(str(table["arguments"][1])) == SAMPLES[1]["arguments"]


def test_an_output_path_of_a_file_finds_what_lm_eval_made_of_it(tmp_path: Path) -> None:
    [made] = write_results(tmp_path).rglob("results_*")
    other = made.with_name("other.json")  # none of lm-eval's
    other.write_text("{}", "utf-8")
    renamed = made.rename(made.with_name(made.name.replace("results_", "quick_")))
    for given in (made.with_name("quick.json"), tmp_path, renamed):
        [results] = find_results(given)
        assert results.path == renamed and list(results.samples) == ["tiny"]
    [sample] = tmp_path.rglob("samples_*")
    sample.rename(sample.with_name("samples_tiny_2026-03-04T05-06-08.000008.jsonl"))
    assert find_results(tmp_path)[0].samples == {}  # of another call
    with pytest.raises(EvaluationError, match=r"must hold results of lm-eval; got .*slow\.json"):
        find_results(made.with_name("slow.json"))


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {**CONTENT, "results": {}},
        {"results": 3},
        {**CONTENT, "results": ["tiny"]},
        {**CONTENT, "results": {"tiny": 3}},
        {**CONTENT, "total_evaluation_time_seconds": "long"},
        {**CONTENT, "date": 1e999},
        *({**CONTENT, "results": {name: CONTENT["results"]["tiny"]}} for name in NO_FILES),
    ],
)
def test_a_folder_without_results_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    if content is not None:
        write_results(tmp_path, content)
    with pytest.raises(EvaluationError, match=r"as lm-eval writes it|results of lm-eval"):
        find_results(tmp_path)


def test_results_are_one_run_that_a_second_call_leaves_alone(
    store: str, results: HarnessResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))

    def logged() -> dict[str, str]:
        printed = CliRunner().invoke(app, ["log-lm-eval", str(results.path.parent), "--json"])
        assert printed.exit_code == 0, printed.exception
        (row,) = json.loads(printed.stdout)["runs"]
        return dict(row)

    client = MlflowClient(store)
    client.update_run(logged()["run_id"], "RUNNING")  # as a kill before the last call leaves it
    again = logged()
    assert again["new"] and logged() == again | {"new": False}
    client.delete_run(again["run_id"])
    log, side = MlflowClient.log_table, list[Future[dict[str, object]]]()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as slow:

        def beside(*args: Any) -> None:  # another call begins while this one writes
            if not side:
                side.append(pool.submit(log_results, Tracker(), results))
                wait(side, 2)
            log(*args)

        slow.setattr(MlflowClient, "log_table", beside)
        again = logged()
    assert again | side[0].result() == again | {"new": False}
    (run,) = runs_of(store, "harness")
    assert (run.info.run_id, run.info.status) == (again["run_id"], "FINISHED")
    assert run.data.metrics == {fit_name(n): value for n, value in results.metrics().items()}
    assert run.data.params == flatten(results.params())
    assert {"samples/tiny.json", results.path.name} <= set(files_of(client, run.info.run_id))
    table = client.load_table(again["experiment_id"], "samples/tiny.json", [run.info.run_id])
    assert table["prompt"].tolist() == [PROMPT, PROMPT]
