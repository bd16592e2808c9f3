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
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.answers import RAW_TAIL, shortened, text_of
from benchmarks.runner import Benchmark, Report, kept, points, tell
from benchmarks.subjects import CHECKPOINT_OPTIONS, identity, load
from umim_core import UMIM
from umim_core.baselines.truncation import Truncation
from umim_core.config.form import Merge
from umim_core.errors import CorpusError, require
from umim_core.evaluation.text_metrics import code_tests
from umim_core.text.documents import read_objects

_ENDS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a function of HumanEval
_ASKED: Final = (
    "\nPlease reason step by step, and end with the line: The answer is <number>."  # GSM8K
)
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


SETS: Final = {  # new tokens, what counts, and what a row has
    "humaneval": (192, solves_function, ("prompt", "test", "entry_point")),
    "gsm8k": (256, solves_word_problem, ("question", "answer")),
}


def run(options: argparse.Namespace, report: Report) -> None:
    # cuDNN plans attention anew for every length, and decoding has a new one at every token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    targets: list[float | None] = options.target_tr or [None]
    models = list[UMIM]()
    for target in targets:
        models.append(load(options, report, target, models[0].backbone if models else None))
    report["sets"] = {}
    for name, (new_tokens, solves, fields) in SETS.items():
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        rows = [row for _, row in islice(read_objects(path), options.most)]
        rule = f"every row of --{name} must have {', '.join(fields)}"
        require(all(row.keys() >= set(fields) for row in rows), CorpusError, rule, str(path))
        asked = prompts_of(name, rows)
        base, _ = answer(models[0], asked, "none", new_tokens, options)
        for target, umim in zip(targets, models, strict=True):
            answers, saving = answer_shorter(umim, asked, new_tokens, options)
            solved = {
                side: [solves(text, row) for text, row in zip(texts, rows, strict=True)]
                for side, texts in ({"base": base} | answers).items()
            }
            label = name if target is None else f"{name}, target {100 * target:g}%"
            report["sets"][label] = figures(solved, saving, new_tokens) | {"rules": len(umim.rules)}
            tell(label, report["sets"][label]["sides"])


def prompts_of(name: str, rows: Sequence[Row]) -> list[Any]:
    if name == "humaneval":
        return [row["prompt"] for row in rows]
    return [[{"role": "user", "content": row["question"] + _ASKED}] for row in rows]


def answer_shorter(
    umim: UMIM, asked: list[Any], new_tokens: int, options: argparse.Namespace
) -> tuple[dict[str, list[str]], float]:
    """Return answers to shortened prompts by side, and the mean share of layer-tokens saved."""
    merged, reductions = answer(umim, asked, "prompt", new_tokens, options)
    savings = [reduction * umim.merged_model.saved_share for reduction in reductions]
    cut = [
        shortened(Truncation(), text_of(one, umim.backbone), saving)
        for one, saving in zip(asked, savings, strict=True)
    ]
    truncated, _ = answer(umim, cut, "none", new_tokens, options)
    return {"umim": merged, "truncation": truncated}, float(np.mean(savings))


def answer(
    umim: UMIM, asked: list[Any], merge: Merge, new_tokens: int, options: argparse.Namespace
) -> tuple[list[str], list[float]]:
    """Return greedy answers, and the token reductions of their prompts, both in the asked order."""
    order = sorted(range(len(asked)), key=lambda place: len(str(asked[place])))
    found: dict[int, tuple[str, float]] = {}
    known = identity(umim, merge) if options.answers else ()

    def of_batch(prompts: list[Any]) -> list[tuple[str, float]]:
        tail = {"raw_tail": RAW_TAIL} if merge == "prompt" else {}
        out = umim.generate(
            prompts, merge=merge, max_new_tokens=new_tokens, do_sample=False, **tail
        )
        return list(zip(out.text, map(float, out.token_reduction), strict=True))

    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        prompts = [asked[place] for place in batch]
        written = [one.tolist() if isinstance(one, np.ndarray) else one for one in prompts]
        decides = [*known, new_tokens, written]
        found |= zip(batch, kept(options.answers, decides, partial(of_batch, prompts)), strict=True)
    texts, reductions = zip(*(found[place] for place in range(len(asked))), strict=True)
    return list(texts), list(reductions)


def figures(solved: Mapping[str, Sequence[bool]], saving: float, new_tokens: int) -> Report:
    return {
        "problems": len(solved["base"]),
        "new_tokens": new_tokens,
        "saving": saving,
        "sides": {
            side: {"solved": sum(right), "points": points(right, solved["base"])}
            for side, right in solved.items()
        },
        "rows": {side: [int(x) for x in right] for side, right in solved.items()},
    }


BENCHMARK: Final = Benchmark(
    options=CHECKPOINT_OPTIONS
    | {
        "humaneval": Path,
        "gsm8k": Path,
        "batch_size": 8,
        "target_tr": {"nargs": "*", "type": float},
        "answers": Path,
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
