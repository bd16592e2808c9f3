"""The page of ``benchmarks/engine.py``."""

from __future__ import annotations

from benchmarks.common import Report
from benchmarks.tables import gate_table, machine, spread, table

_MIB = 2.0**20


def engine_page(report: Report) -> str:
    """Return the page of ``benchmarks/engine.py``."""
    parts = [
        "# Engine: ours and transformers, with rules and without",
        f"On {report['device']}, {report['dtype']}, {report['new_tokens']} new tokens. Ratios are "
        "medians over alternating pairs, with quartiles. *random-llama* has random weights in "
        "realistic proportions (512 wide, 8 layers, 8 heads of which 4 for keys, vocabulary "
        "32,000) and rules mined on random phrases.",
        "## Without rules",
        table(
            [
                "backbone, rows x tokens: side",
                "time (quartiles)",
                "tok/s",
                "time against ours",
                "ids",
            ],
            [row for name in report["backbones"] for row in _engine_rows(report, name)],
        ),
        "## With rules against without",
        "Both sides generate the text that follows each prompt. Prefill ends with the first token, "
        "matching and merging included; a request is prefill and decode. Bound: the largest "
        "speed-up that the token reduction can give. KV: keys and values at the end.",
        table(
            [
                *("backbone, rows x tokens", "rules", "phase", "TR", "base tok/s", "UMIM tok/s"),
                *("speed-up (quartiles)", "bound", "KV MiB"),
            ],
            [_row(name, row) for name in report["backbones"] for row in _shown(report, name)],
        ),
        "## Matching and merging",
        table(
            ["backbone, rows x tokens", "matching, packing, merging", "share of prefill"],
            [
                [
                    f"{name}, {part['batch_size']} x {part['prompt_tokens']:,}",
                    spread({k: 1e3 * v for k, v in part["seconds"].items()}, " ms"),
                    f"{part['share']:.2%}",
                ]
                for name, measured in report["backbones"].items()
                for part in measured["merging"]
            ],
        ),
        "## Where merging pays",
    ]
    for name, measured in report["backbones"].items():
        parts += [f"### {name}", measured["break_even"].strip()]
    parts += [
        "## Gates",
        "Gates of logits are in units of 1e-5: none at batch size 1, one in batches.",
        gate_table(report),
        machine(report),
    ]
    return "\n\n".join(parts) + "\n"


def _engine_rows(report: Report, name: str) -> list[list[object]]:
    measured = report["backbones"][name]
    length = measured["engine_prompt_tokens"]
    return [
        [
            f"{name}, {batch_size} x {length:,}: {side}",
            spread(values["seconds"], " s", 3),
            f"{values['new_tokens_per_s']:,.0f}",
            spread(values["times_ours"]),
            "equal" if values["equal"] else "DIFFER",
        ]
        for batch_size, sides in measured["engines"].items()
        for side, values in sides.items()
    ]


def _shown(report: Report, name: str) -> list[Report]:
    """Return the rows of the backbone's own rules and of pairs at 50 %."""
    rows = report["backbones"][name]["rows"]
    return [row for row in rows if row["asked_reduction"] in (None, 0.5)]


def _row(name: str, row: Report) -> list[object]:
    quartiles = {"median": row["speedup"], "low": row["speedup_low"], "high": row["speedup_high"]}
    kept = (row["base_kv_bytes"] / _MIB, row["umim_kv_bytes"] / _MIB)
    return [
        f"{name}, {row['batch_size']} x {row['prompt_tokens']:,}",
        row["rules"],
        row["phase"],
        f"{row['token_reduction']:.1%}",
        f"{row['base_tokens_per_s']:,.0f}",
        f"{row['umim_tokens_per_s']:,.0f}",
        spread(quartiles),
        f"{row['bound']:.2f}",
        f"{kept[0]:,.1f} / {kept[1]:,.1f}",
    ]
