"""The frame of every benchmark: options, facts, gates, result file and exit status."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from umim_core.store.disk import write_bytes

ROOT: Final = Path(__file__).resolve().parents[1]
THREADS: Final = 2  # of every side that may use more than one
_REPORT_OPTIONS: Final = {"out": Path, "commit": str}
_HELP: Final = {
    "answers": "of a question",
    "backbone": "name or directory of the frozen model",
    "cache": "folder for what is built",
    "batch_size": "rows of a forward",
    "checkpoint": "name or directory",
    "code": "source files, as a pattern",
    "commit": "recorded",
    "checkpoints": "names or directories; all of one tokenizer where they read the same ids",
    "context": "tokens of a question's context, before merging",
    "counter_tokens": "that Counter reads",
    "ending": "tokens of an answer",
    "data": "folder of the public texts: bfcl, tools, general",
    "device": "cuda or cpu; of distill_step, for --on gpu alone",
    "export": "directory that umim export wrote in float32",
    "export_half": "the same in float16; OpenVINO needs it",
    "features": "model whose hidden states stand in for those of BERTScore and MAUVE; each "
    "checkpoint's backbone if absent",
    "gsm8k": "the published test.jsonl of GSM8K",
    "held_out": "tokens at the end",
    "humaneval": "the published HumanEval.jsonl; what the model writes runs in the sandbox",
    "ids": "one flat array of token ids (.npy)",
    "length": "tokens of a row",
    "merge": "what the checkpoints merge",
    "max_damage": "bound on the price of the rules of decoding, where rules have prices",
    "name": "what the results call the checkpoint; the directory's name if absent",
    "out": "write the results (JSON) and their page here",
    "on": "embedded (reads --ids, --shapes), smollm2 (--checkpoint) or gpu (--device, --length)",
    "only": "rows to train and measure; all if absent",
    "pairs": "alternating runs of each side",
    "raw_tails": "last tokens of a prompt that stay raw, each a setting of its own",
    "questions": "of a batch",
    "ray": "ids (.npy) for the Ray path, at least 1e8",
    "ray_tokens": "read only the first so many of them",
    "reductions": "token reductions to meet",
    "rounds": "alternating runs of each side; 3 of those that take over 10 s",
    "saving": "share of layer-tokens that every row saves, by rules of its own",
    "rules": "rule directory; those of the checkpoint shipped for the backbone if absent",
    "seeds": "of repeated runs",
    "segments": "that train",
    "shapes": "of the loss with --on embedded",
    "steps": "of the optimiser, of every row",
    "tau": "least count of an n-gram",
    "test": "text that quality is measured on, as ids (.npy) or as umim mine takes it",
    "text": "UTF-8 text, a document a line",
    "tiny": "the same code on the processor, with tiny shapes",
    "tokenizer": "of the ids",
    "tokens": "read only the first so many",
    "train": "text that is trained on, likewise",
    "window": "tokens of a window, half of which are shortened",
}

Gate = tuple[float, float, bool]
Report = dict[str, Any]


def at_least(value: float, limit: float) -> Gate:
    """Return value, limit and verdict of a gate that asks for more."""
    return round(value, 4), round(limit, 4), value >= limit


def at_most(value: float, limit: float) -> Gate:
    """Return value, limit and verdict of a gate that asks for less."""
    return round(value, 4), round(limit, 4), value <= limit


def no_error_gate_missed(report: Report) -> bool:
    """Return whether losses and gradients are those that they are compared with."""
    return all(gate[2] for name, gate in report["gates"].items() if name.endswith("error"))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a command.

    Attributes:
        name: As the results say it; their page goes by it.
        doc: Its first line describes the command.
        options: As in :func:`parse`, on top of ``--out`` and ``--commit``.
        measure: Fills the report; may :func:`save` it on the way.
        gates: Value, limit and verdict of each gate of a report; None where nothing is gated.
        equal: Whether all sides gave the same results, once the gates stand in the report.
        libraries: Those whose versions are recorded.
    """

    name: str
    doc: str
    options: Mapping[str, object]
    measure: Callable[[argparse.Namespace, Report], None]
    gates: Callable[[Report], dict[str, Gate]] | None = None
    equal: Callable[[Report], bool] = itemgetter("equal")
    libraries: Sequence[str] = ("numpy", "torch", "transformers")

    def main(self, arguments: list[str] | None = None) -> int:
        """Run it; 1 if a gate is missed or a result differs."""
        options = parse(self.doc, self.options | _REPORT_OPTIONS, arguments)
        fix_threads()
        report: Report = {"benchmark": self.name, "facts": facts(self.libraries, options.commit)}
        self.measure(options, report)
        if self.gates is not None:
            report["gates"] = self.gates(report)
            report["equal"] = self.equal(report)
        return close(report, options.out)


def parse(
    doc: str, options: Mapping[str, object], arguments: list[str] | None = None
) -> argparse.Namespace:
    """Read a command line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, value in options.items():
        settings: dict[str, Any] = {"type": type(value), "default": value}
        if isinstance(value, type):
            settings = {"type": value}
        elif isinstance(value, list):
            settings = {"nargs": "+", "type": type(value[0]), "default": value}
        elif isinstance(value, tuple):
            settings = {"nargs": "+", "choices": value, "default": list(value)}
        elif isinstance(value, dict):
            settings = value
        parser.add_argument(f"--{name.replace('_', '-')}", help=_HELP.get(name), **settings)
    return parser.parse_args(arguments)


def named_backbone(backbone: str | None) -> dict[str, str]:
    """Return the load option that says where a checkpoint's backbone lies, where it is given."""
    return {} if backbone is None else {"backbone": backbone}


def named(words: Sequence[str]) -> dict[str, str]:
    """Return checkpoints by name, of NAME=WHERE or WHERE alone, which is named by its last part."""
    pairs = [word.rpartition("=") for word in words]
    checkpoints = {name or Path(where).name: where for name, _, where in pairs}
    if len(checkpoints) < len(words):
        raise SystemExit(f"every checkpoint needs a name of its own: {', '.join(words)}")
    return checkpoints


def fresh(module: str, **options: object) -> Any:
    """Run a module of this folder in a new process and return the JSON of its last line."""
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def fix_threads() -> None:
    """Give every library the same threads; some read them when they are imported."""
    os.environ["POLARS_MAX_THREADS"] = str(THREADS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(THREADS)


def facts(libraries: Sequence[str], commit: str | None) -> dict[str, object]:
    """Return where and with what was measured; no paths."""
    return {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        },
    }


def save(report: Report, out: Path | None) -> None:
    """Write the results; who is killed meanwhile leaves those before."""
    if out is not None:
        write_bytes(out, (json.dumps(report, indent=2) + "\n").encode())


def close(report: Report, out: Path | None) -> int:
    """Write the results, their page and figure, print page and one JSON line; return the status."""
    # Not in the processes that are measured: it draws.
    from docs.make.results import benchmark_page, documents_of

    save(report, out)
    for document in documents_of(out) if out is not None else ():
        document.write()
    text = json.dumps(report)
    print(benchmark_page(json.loads(text)))
    print(text)
    gates = report.get("gates", {}).values()
    return int(not report.get("equal", True) or not all(passed for _, _, passed in gates))
