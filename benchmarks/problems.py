"""Problems solved from merged prompts: HumanEval and GSM8K in batches, greedy.

    python -m benchmarks.problems --checkpoint DIR --humaneval FILE --gsm8k FILE --out FILE.json

``--humaneval`` and ``--gsm8k`` are the published files (HumanEval.jsonl, test.jsonl), of which the
first ``--most`` problems are read. The base model, merged prompts with 16 raw tokens at their end,
and truncation to the same saving answer each once. A function counts if its tests pass in the
sandbox; a word problem if the number behind the first "answer is", or else the last number, is the
right one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.answers import RAW_TAIL, SUBJECT, chat_of, load, points, shortened
from benchmarks.runner import Benchmark, Report
from umim_core import UMIM
from umim_core.baselines.methods import Text
from umim_core.baselines.truncation import Truncation
from umim_core.errors import CorpusError, require
from umim_core.evaluation.text_metrics import code_tests
from umim_core.model.inputs import encode_prompts
from umim_core.text.rows import read_objects

_ENDS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of a function of HumanEval
_ASKED: Final = (
    "\nPlease reason step by step, and end with the line: The answer is <number>."  # GSM8K
)
_NUMBER: Final = r"-?\$?\d[\d,]*(?:\.\d+)?"
_NAMED: Final = re.compile(rf"(?i)answer is[^\d\n-]{{0,12}}({_NUMBER})")
Row = Mapping[str, Any]


def solves_function(answer: str, row: Row) -> bool:
    """Return whether a completion passes the tests of its function."""
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
    umim = load(options, report)
    report["sets"] = {}
    for name, (new_tokens, solves, fields) in SETS.items():
        path: Path | None = getattr(options, name)
        if path is not None:
            rows = [row for _, row in islice(read_objects(path), options.most)]
            rule = f"every row of --{name} must have {', '.join(fields)}"
            require(all(row.keys() >= set(fields) for row in rows), CorpusError, rule, str(path))
            answers, saving = answer_all(umim, name, rows, new_tokens, options.batch_size)
            solved = {
                side: [solves(text, row) for text, row in zip(texts, rows, strict=True)]
                for side, texts in answers.items()
            }
            report["sets"][name] = figures(solved, saving, new_tokens)
            print(name, report["sets"][name]["sides"], file=sys.stderr, flush=True)


def answer_all(
    umim: UMIM, name: str, rows: Sequence[Row], new_tokens: int, batch_size: int
) -> tuple[dict[str, list[str]], float]:
    """Return the answers of every side, and the mean share of layer-tokens that merging saves."""
    if name == "humaneval":
        prompts: list[Any] = [row["prompt"] for row in rows]
    else:
        prompts = [[{"role": "user", "content": row["question"] + _ASKED}] for row in rows]

    def answer(asked: list[Any], **options: Any) -> tuple[list[str], list[float]]:
        order = sorted(range(len(asked)), key=lambda place: len(str(asked[place])))
        found: dict[int, tuple[str, float]] = {}
        greedy = {"max_new_tokens": new_tokens, "do_sample": False, **options}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            out = umim.generate([asked[place] for place in batch], **greedy)
            found |= zip(batch, zip(out.text, out.token_reduction, strict=True), strict=True)
        texts, reductions = zip(*(found[place] for place in range(len(asked))), strict=True)
        return list(texts), list(reductions)

    base, _ = answer(prompts, merge="none")
    merged, reductions = answer(prompts, merge="prompt", raw_tail=RAW_TAIL)
    savings = [float(reduction) * umim.merged_model.saved_share for reduction in reductions]
    pairs = zip(prompts, savings, strict=True)
    truncated, _ = answer([_truncated(umim, asked, share) for asked, share in pairs], merge="none")
    return {"base": base, "umim": merged, "truncation": truncated}, float(np.mean(savings))


def _truncated(umim: UMIM, asked: Any, saving: float) -> np.ndarray:
    """Return the ids of a prompt without its first tokens that may go."""
    if isinstance(asked, str):
        ids = np.asarray(encode_prompts([asked], umim.backbone, None)[0])
        protected = np.zeros(len(ids), dtype=bool)
        protected[-RAW_TAIL:] = True
        prompt = Text(ids, protected, ids[-RAW_TAIL:])
    else:
        prompt = chat_of(asked[0]["content"], umim.backbone)
    return shortened(Truncation(), prompt, saving)


def figures(solved: Mapping[str, Sequence[bool]], saving: float, new_tokens: int) -> Report:
    """Return how many problems each side solves, and its points against the base model."""
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
    name="problems",
    doc=__doc__,
    options=SUBJECT | {"humaneval": Path, "gsm8k": Path, "batch_size": 8},
    measure=run,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
