"""Answers in benchmarks: checkpoints to load, greedy answers, how many stay right."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from benchmarks.runner import Report, device_name
from benchmarks.subjects import Ids
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Text, reduce_tokens
from umim_core.baselines.truncation import Truncation
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, require
from umim_core.evaluation.standard_errors import mean_difference_error
from umim_core.model.inputs import encode_prompts
from umim_core.store.artifacts import json_digest, read_json, write_json
from umim_core.text.roles import Role
from umim_core.text.template_process import Chat

RAW_TAIL: Final = 16
CHECKPOINT_OPTIONS: Final[dict[str, object]] = {
    "checkpoint": {"required": True},
    "name": str,
    "backbone": str,
    "budget": float,
    "dtype": {"default": "bfloat16", "choices": ("float32", "bfloat16")},
    "device": "cpu",
}
# How many questions are asked, how many at once, and where answers to them stay.
ASKED: Final[dict[str, object]] = {"most": 1000, "batch_size": 8, "answers": Path}


def load(
    options: argparse.Namespace,
    report: Report,
    role: Role | None,
    target_tr: float | None = None,
    backbone: Backbone | None = None,
) -> UMIM:
    """Load the checkpoint of ``CHECKPOINT_OPTIONS``, which merges a role; report what it is."""
    where: dict[str, Any] = {"budget": options.budget, "target_tr": target_tr}
    of_model = ("backbone", "dtype", "device") if backbone is None else ()
    where |= {"backbone": backbone} | {name: getattr(options, name) for name in of_model}
    umim = UMIM.from_pretrained(options.checkpoint, **where)
    roles = umim.checkpoint.config.roles
    rule = f"the checkpoint must recommend the role {role!r}, or nothing that is asked merges"
    remedy = f'Save another: Checkpoint.load(DIR).recommending("prompt", 0, ["{role}"]).save(OUT).'
    found = ", ".join(roles) or "no role"
    require(role is None or role in roles, ConfigError, rule, found, remedy)
    report["facts"]["device"] = device_name(umim.backbone.device)
    report |= {
        "checkpoint": options.name or Path(options.checkpoint).name,
        "backbone": Path(umim.backbone.name).stem,
        "rules": len(umim.rules),
        "dtype": options.dtype,
    }
    return umim


def identity(umim: UMIM, merge: Merge) -> list[object]:
    """Return what decides an answer beside the prompt: the backbone, and what merges."""
    model: list[object] = [umim.backbone.fingerprint, str(umim.backbone.dtype)]
    if merge != "none":
        form = umim.checkpoint.config.form()
        model += [merge, form, umim.rules.digest, umim.module.digest()]
    return model


def kept(folder: Path | None, decides: object, make: Callable[[], Any]) -> Any:
    """Return what is made of all that ``decides`` names; what lies in the folder is read there."""
    if folder is None:
        return make()
    file = folder / f"{json_digest(decides)}.json"
    if not file.exists():
        made = make()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, made)
    return read_json(file)


def answer(
    umim: UMIM, asked: list[Any], merge: Merge, new_tokens: int, options: argparse.Namespace
) -> tuple[list[str], list[float]]:
    """Return greedy answers, and the token reductions of their prompts, both in the asked order."""
    order = sorted(range(len(asked)), key=lambda place: len(str(asked[place])))
    found: dict[int, tuple[str, float]] = {}
    known = identity(umim, merge) if options.answers else ()

    def of_batch(prompts: list[Any]) -> list[tuple[str, float]]:
        tail = RAW_TAIL if merge == "prompt" else None
        out = umim.generate(
            prompts, merge=merge, raw_tail=tail, max_new_tokens=new_tokens, do_sample=False
        )
        return list(zip(out.text, map(float, out.token_reduction), strict=True))

    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        prompts = [asked[place] for place in batch]
        written = [one.tolist() if isinstance(one, np.ndarray) else one for one in prompts]
        decides = [*known, new_tokens, written]
        found |= zip(batch, kept(options.answers, decides, partial(of_batch, prompts)), strict=True)
    rows = [found[place] for place in range(len(asked))]
    return [text for text, _ in rows], [reduction for _, reduction in rows]


def answer_shorter(
    umim: UMIM, asked: list[Any], new_tokens: int, options: argparse.Namespace
) -> tuple[dict[str, list[str]], list[float]]:
    """Return answers to shortened prompts by side, and the shares of layer-tokens saved."""
    merged, reductions = answer(umim, asked, "prompt", new_tokens, options)
    savings = [reduction * umim.merged_model.saved_share for reduction in reductions]
    cut = [truncated(*one, umim.backbone) for one in zip(asked, savings, strict=True)]
    behind, _ = answer(umim, cut, "none", new_tokens, options)
    return {"umim": merged, "truncation": behind}, savings


def truncated(asked: str | Chat, saving: float, backbone: Backbone) -> Ids:
    """Return the ids of a text, or a chat of one message, without the first of what is said.

    A chat's template stays, and the last of what is said.
    """
    (prompt,) = encode_prompts([asked], backbone, None)
    ids, tokens = prompt.ids.astype(np.int64), len(prompt.ids)
    first, end = prompt.parts[0] if prompt.parts else (0, tokens)
    protected = np.ones(tokens, dtype=bool)
    protected[first : max(first, end - RAW_TAIL)] = False
    text = Text(ids, protected, np.zeros(0, dtype=np.int64))
    return ids[reduce_tokens(Truncation(), text, tokens - round(saving * tokens))]


def points(right: Sequence[bool], base: Sequence[bool]) -> dict[str, float | None]:
    """Return the difference to the base model in per cent of questions, with its paired error."""
    own, others = ([100.0 * one for one in side] for side in (right, base))
    return {"mean": mean(own) - mean(others), "std": mean_difference_error(own, others)}
