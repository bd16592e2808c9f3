"""lm-eval's command: the model that ``--model_args`` name, errors in one line."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import default_device, has_device
from umim_core.backbone.tokenizer_files import quantisation_note
from umim_core.baselines.methods import TargetReduction
from umim_core.baselines.registry import find_baseline
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CheckpointConfig, default_checkpoint, named_config
from umim_core.config.form import Merge, check_merge, check_raw_tail
from umim_core.errors import ConfigError, UmimError, did_you_mean, require
from umim_core.merging.merged_model import MergedModel
from umim_core.model.hub import fetch_checkpoint
from umim_core.model.loading import LoadOptions, find_backbone
from umim_core.model.umim import UMIM
from umim_core.text.roles import check_roles

AskedMerge = Merge | Literal["auto"]
AUTO: Final = "auto"  # merge as the checkpoint recommends
P = ParamSpec("P")
R = TypeVar("R")
_COMMANDS: Final = ("lm_eval", "lm-eval")
_BATCH_SIZE: Final = re.compile(r"auto|(?=.*[1-9])([0-9]+|auto:[0-9]*\.?[0-9]+)")
_log = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger: shown when its lines are


def check_modes(asked: Mapping[str, Any], merge: Merge, raw_tail: int) -> TargetReduction | None:
    """Refuse arguments that do not go together, None for those not given; see ``UmimLM``.

    Returns the token reduction that a baseline is asked for; None for that of the rules.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    check_merge(merge)
    check_raw_tail(raw_tail, merge)
    if "roles" in given:
        check_roles(given["roles"])
    none, method = merge == "none", given.get("method")
    target_tr, protect = given.get("target_tr"), given.get("protect")
    target = target_tr is not None
    on_cache = method is not None and find_baseline(method).side == "cache"
    broken = {
        "compare must be base": given.get("compare", "base") != "base",
        "a baseline merges prompts only": method is not None and merge != "prompt",
        "protect is of the checkpoint's own rules, not of a baseline": method and protect,
        "raw_tail changes nothing of a policy that reads contexts whole": (
            on_cache and target and raw_tail
        ),
        "compare=base needs a model that merges": none and "compare" in given,
        "protect keeps tokens from being merged": none and protect,
        "budget chooses rules": none and "budget" in given,
        "roles say whose contents of a chat merge": none and "roles" in given,
        "target_tr chooses rules, or is the budget of a baseline (method)": none and target,
        "allow_backbone_mismatch must not come with merge=none, which takes any backbone": (
            none and "allow_backbone_mismatch" in given
        ),
    }
    given |= {"merge": merge, "raw_tail": raw_tail}
    value = ", ".join(f"{name}={each}" for name, each in given.items())
    for rule, is_broken in broken.items():
        require(not is_broken, ConfigError, rule, value, "Leave one of them out.")
    return None if method is None or target_tr is None else TargetReduction(target_tr)


def check_sizes(batch_size: int | str, max_batch_size: int, max_length: int | None) -> None:
    """Refuse sizes that are none: lm-eval's command passes on whatever it is given."""
    rule = "batch_size must be a whole number of at least 1, auto or auto:N with a number N above 0"
    fits = _BATCH_SIZE.fullmatch(str(batch_size)) is not None
    require(fits, ConfigError, rule, batch_size, "Use auto.")
    for name, size in {"max_batch_size": max_batch_size, "max_length": max_length}.items():
        rule = f"{name} must be a whole number of at least 1"
        fits = (size is None and name == "max_length") or (type(size) is int and size > 0)
        require(fits, ConfigError, rule, size, "Correct it, or leave it out.")


def recommended(
    config: CheckpointConfig | None,
    merge: AskedMerge,
    raw_tail: int | None,
    method: str | None,
    target_tr: float | None,
) -> tuple[Merge, int]:
    """Return what is merged and the raw tail, as ``UMIM.generate`` chooses them.

    A baseline ``method`` reads prompts merged, or shortened, alone; with a target of its own,
    policies of the cache take no raw tail.
    """
    if merge == "none" or config is None:
        return "none", raw_tail or 0
    if method is not None:
        merge = "prompt" if merge == AUTO else merge
        if raw_tail is None and target_tr and find_baseline(method).side == "cache":
            raw_tail = 0
    return config.recommended(None if merge == AUTO else merge, raw_tail)


def open_model(
    source: str | Path | Checkpoint | None,
    config: CheckpointConfig | None,
    merge: Merge,
    named: LoadOptions,
) -> MergedModel:
    """Open what was named; see ``UmimLM``.

    With ``merge=none`` a checkpoint only names its backbone: nothing but its configuration is read,
    and not even that where a backbone is given.
    """
    options, device = LoadOptions(**named), named.get("device")
    if isinstance(options.get("backbone"), Backbone):
        del options["dtype"], options["device"]  # it has its own
    else:
        if str(device).startswith("cuda") and not has_device("cuda"):
            # lm-eval's command line asks for cuda:0 by default.
            _log.info("umim: no CUDA device, using the CPU instead of %s", device)
            device = "cpu"
        options["device"] = device or default_device()
    if merge != "none":
        merged_model = UMIM.from_pretrained(source, **options).merged_model
    else:
        merged_model = MergedModel.without_merging(find_backbone(config, options))
    if note := quantisation_note(merged_model.backbone.name):
        _log.info("umim: %s", note)
    return merged_model


def checkpoint_config(source: str | Path | Checkpoint) -> CheckpointConfig:
    if isinstance(source, Checkpoint):
        return source.config
    return named_config(source)


def named_checkpoint(checkpoint: str | Path | Checkpoint | None) -> str | Path | Checkpoint:
    """Return a checkpoint, fetched once, or the one that is taken where none is named."""
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    name, origin = checkpoint, "checkpoint="
    if name is None:
        name, origin = os.environ.get("UMIM_CHECKPOINT") or None, "UMIM_CHECKPOINT"
    if name is None:
        name, origin = default_checkpoint(), "the embedded default"
    _log.info("umim: checkpoint %s (from %s)", name, origin)
    return fetch_checkpoint(name)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End lm-eval's command with one line; every other caller gets the typed error as it is.

    lm-eval builds models and tasks deep inside its command and catches nothing on the way out.
    """
    try:
        yield
    except UmimError as error:
        program = Path(sys.argv[0] if sys.argv else "")
        if program.stem not in _COMMANDS and program.parts[-2:] != ("lm_eval", "__main__.py"):
            raise
        raise SystemExit(f"umim: error: {error}") from error


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        rule = f"an argument of the model must be one of {', '.join(known[1:])}"
        for name in kwargs:
            remedy = did_you_mean(name, known) or "Leave it out."
            require(name in known, ConfigError, rule, name, remedy)
        return function(*args, **kwargs)

    return checked
