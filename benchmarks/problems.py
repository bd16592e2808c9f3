"""Problems solved from merged prompts: HumanEval and GSM8K in batches, greedy.

    python -m benchmarks.problems --checkpoint DIR --humaneval FILE --gsm8k FILE --out FILE.json

``--humaneval`` and ``--gsm8k`` are the published files (HumanEval.jsonl, test.jsonl), of which the
first ``--most`` problems are read. The tests of a function run in the sandbox; the number of a word
problem is that behind the first "answer is", or else the last. By each ``--target-tr`` of a text
the checkpoint merges with its cheapest spans alone. ``--answers`` names a folder in which answers
stay, so that a killed run goes on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, Final

import torch

from benchmarks.answering import ASKED, CHECKPOINT_OPTIONS, answer, answer_shorter, load, points
from benchmarks.runner import Benchmark, Report, tell
from umim_core import UMIM
from umim_core.errors import CorpusError, require
from umim_core.evaluation.text_metrics import code_tests
from umim_core.text.documents import read_objects
from umim_core.text.roles import Role
from umim_core.text.template_process import Chat

_ENDS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a function of HumanEval
_ASKED: Final = "\nPlease reason step by step, and end with the line: The answer is <number>."
_NUMBER: Final = r"-?\$?\d[\d,]*(?:\.\d+)?"
_NAMED: Final = re.compile(rf"(?i)answer is[^\d\n-]{{0,12}}({_NUMBER})")
Row = Mapping[str, Any]


def solves_function(answer: str, row: Row) -> bool:
    for end in _ENDS:
        answer = answer.split(end)[0]
    return code_tests([answer], row)["pass@1"] == 1.0


def solves_word_problem(answer: str, row: Row) -> bool:
    """Return whether an answer gives the number behind ``####`` of the published one."""
    named = _NAMED.search(answer)
    numbers = [named.group(1)] if named else re.findall(_NUMBER, answer)
    right = row["answer"].rpartition("####")[2].strip()
    return bool(numbers) and _value(numbers[-1]) == _value(right)


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("$", ""))


Problems = tuple[int, Callable[[Row], str | Chat], Callable[[str, Row], bool], Sequence[str]]
SETS: Final[dict[str, Problems]] = {  # new tokens, the prompt, what counts, and what a row has
    "humaneval": (
        192,
        lambda row: row["prompt"],
        solves_function,
        ("prompt", "test", "entry_point"),
    ),
    "gsm8k": (
        256,
        lambda row: [{"role": "user", "content": row["question"] + _ASKED}],
        solves_word_problem,
        ("question", "answer"),
    ),
}


def run(options: argparse.Namespace, report: Report) -> None:
    # cuDNN plans attention anew for every length, and decoding has a new one at every token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    targets: list[float | None] = options.target_tr or [None]
    role: Role | None = "user" if options.gsm8k else None  # problems of HumanEval are no chats
    models = list[UMIM]()
    for target in targets:
        backbone = models[0].backbone if models else None
        models.append(load(options, report, role, target, backbone))
    report["sets"] = {}
    for name, (new_tokens, prompt, solves, fields) in SETS.items():
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        rows = [row for _, row in islice(read_objects(path), options.most)]
        rule = f"every row of --{name} must have {', '.join(fields)}"
        require(all(row.keys() >= set(fields) for row in rows), CorpusError, rule, str(path))
        asked = [prompt(row) for row in rows]
        base, _ = answer(models[0], asked, "none", new_tokens, options)
        for target, umim in zip(targets, models, strict=True):
            answers, savings = answer_shorter(umim, asked, new_tokens, options)
            solved = {
                side: [solves(text, row) for text, row in zip(texts, rows, strict=True)]
                for side, texts in ({"base": base} | answers).items()
            }
            sides = {
                side: {"solved": sum(right), "points": points(right, solved["base"])}
                for side, right in solved.items()
            }
            label = name if target is None else f"{name}, target {100 * target:g}%"
            report["sets"][label] = {
                "problems": len(rows),
                "new_tokens": new_tokens,
                "saving": mean(savings),
                "sides": sides,
                "rows": {side: list(map(int, right)) for side, right in solved.items()},
                "rules": len(umim.rules),
            }
            tell(label, sides)


BENCHMARK: Final = Benchmark(
    options=CHECKPOINT_OPTIONS
    | ASKED
    | {
        "humaneval": Path,
        "gsm8k": Path,
        "target_tr": {"nargs": "*", "type": float},
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
