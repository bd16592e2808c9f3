"""Cards of the adapted checkpoints that ship, from the results of their adaptations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from docs.make.document import RESULTS, Document
from tasks.paper.adaptation_rows import CLEARLY, adaptation_rows, clear, label
from tasks.report.page_template import Report, page
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.embedded.assets import embedded_names
from umim_core.errors import ConfigError

_SIDES: Final = {
    1: "clearly above the base model's",
    -1: "clearly below the base model's",
    0: "not told apart from the base model's",
}


def _shown(report: Report) -> Iterator[Report]:
    """Yield base model, start, every setting at the checkpoint's threshold, and controls."""
    base = report["base"]
    accuracy = {"mean": base["accuracy"], "std": base.get("accuracy_se")}
    yield {"setting": "base", "token_reduction": 0.0, "accuracy": accuracy}
    for row in _rows(report):
        mean = {"mean": row["accuracy"], "std": None}
        yield row | {"accuracy": mean, "seeds": row["seeds"] or None}


def _rows(report: Report) -> list[Report]:
    return [row for row in adaptation_rows(report) if row["tau"] in (None, report["tau"])]


def _verdict(report: Report) -> str:
    """Say how the setting compares with the base model."""
    (own,) = [row for row in _rows(report) if row["setting"] == report["setting"]]
    side = _SIDES[clear(own["difference"], own["reach"])]
    return f"The accuracy of {label(own)} is {side}: a difference counts {CLEARLY}."


_CARD: Final = page(
    """\
# {name}

A UMIM merge checkpoint (`checkpoint/`: merge module and rules) for the frozen backbone
`{backbone}`, which is found by its name: *{setting}*, the checkpoint `{checkpoint}` (*WT*) adapted
to the task `{task}`. It is for that task: its rules are of the task's questions, so it merges
little of other text.

**Rules**: {rules:,} bigrams that occur at least {tau} times in {questions.train:,} training
questions.

**Module**: {parameters:,} parameters in float32, as it was measured. Its setting and threshold
were named before the test questions were scored, and it is of the first seed; thresholds {taus_run}
and seeds {seeds_run} were run.

@ verdict

@ shown
< setting  | {setting}
seeds      | {seeds?–}
TR         | {token_reduction:.1%}
accuracy % | {accuracy!p:.1f}
change, points | {change?–!p:+.1f}
over seeds | {spread?–!p:.1f}

{questions.test:,} test questions, means over seeds. TR: share of the
tokens of contexts that merging saves; what has none there and is trained is a control that merges
nothing. *Change*: against the base model, ± its standard error over
questions, paired. The checkpoint that ships reaches {point.accuracy!p:.1f} % at a TR of
{point.token_reduction:.1%}.

All thresholds, settings and controls, the training and the limits: docs/results/{results}.md, made
by `python -m flows run adaptation/{adaptation}`.
""",
    shown=_shown,
    verdict=_verdict,
)
_FRONT: Final = "---\nlicense: apache-2.0\nlibrary_name: umim\n---\n"


def cards(results: Path = RESULTS) -> list[Document]:
    """Return the card of every shipped checkpoint that notes the results of its adaptation.

    Args:
        results: Folder of result files.
    """
    return [
        Document(resolve_checkpoint(name).parent / "README.md", partial(card, name, results))
        for name in embedded_names("checkpoint")
        if "results" in read_config(resolve_checkpoint(name)).training
    ]


def card(name: str, results: Path) -> str:
    """Return the card of an adapted checkpoint.

    Args:
        name: Embedded name, or directory.
        results: Folder of result files.

    Raises:
        ConfigError: If its results hold no point of its setting, threshold and seed.
    """
    checkpoint = Checkpoint.load(name)
    noted, tau = checkpoint.config.training, checkpoint.rules.origin.tau
    file = results / f"{noted['results']}.json"
    report: Report = json.loads(file.read_text(encoding="utf-8"))
    own = {"setting": noted["setting"], "tau": tau, "seed": noted["seed"]}
    found = [
        (place, point)
        for place in report["backbones"]
        if place["checkpoint"] == noted["start"]
        for point in place["points"]
        if own.items() <= point.items()
    ]
    if not found:
        raise ConfigError(f"{file.name} must hold the point of {name}", own, "Ship it again.")
    place, point = found[0]
    made = {
        "name": Path(name).name,
        "adaptation": report["name"],
        "results": noted["results"],
        "point": point,
        "rules": len(checkpoint.rules),
        "parameters": sum(p.numel() for p in checkpoint.module.parameters()),
        "taus_run": ", ".join(map(str, report["taus"])),
        "seeds_run": ", ".join(map(str, report["seeds"])),
    }
    return f"{_FRONT}{_CARD(report | place | own | made)}\n"
