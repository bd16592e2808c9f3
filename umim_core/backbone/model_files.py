"""Reading models from names, directories and hub repositories, never their code; freezing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from umim_core.backbone.tokenizer_files import first_line, local_file, refuse_code, typed_errors
from umim_core.errors import BackboneError, ConfigError, require

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PUBLISHED: Final = "published"
AUTO: Final = "auto"  # the fastest of the device
# transformers replaces functions of torch and of its own while it loads, for all threads.
_LOADING: Final = Lock()
_MOST_LAYERS: Final = 4096


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep bars and reports of loading weights off the terminal: what is wrong is raised here."""
    shown, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs


def check_dtype(dtype: str) -> None:
    known = [*sorted(DTYPES), PUBLISHED, AUTO]
    rule = f"dtype must be one of {known}"
    require(dtype in known, ConfigError, rule, dtype, "Choose one of them.")


def load_complete(
    kind: Any,
    where: str,
    *,
    what: str,
    name: str,
    complete: str,
    revision: str | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model by a class of transformers from safetensors weights, all of which must be there.

    ``where`` has passed ``check_place``. Messages say ``what`` is loaded, its name, and what a
    complete model would be.
    """
    model: PreTrainedModel
    source: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    with typed_errors(what, name):
        config, _ = PreTrainedConfig.get_config_dict(where, **source)
        refuse_code(what, name, config)
        for field, value in config.items():  # making so many objects takes minutes
            counts = re.search("layer|expert", field) is not None
            if counts and isinstance(value, int) and value > _MOST_LAYERS:
                raise ValueError(f"{field} must be at most {_MOST_LAYERS}, got {value}")
        try:
            with _LOADING, _quietly():
                model, report = kind.from_pretrained(
                    where,
                    output_loading_info=True,
                    use_safetensors=True,
                    trust_remote_code=False,  # None would ask the user, who might agree
                    dtype=dtype,
                    attn_implementation=attn_implementation,
                    **source,
                )
        except (RuntimeError, TypeError, ValueError) as error:
            _check_settings(what, name, where, source)
            if "ignore_mismatched_sizes" in str(error):
                reason = "its weights have other sizes than its config.json says"
                raise ValueError(reason) from error
            raise
        _check_types(where, revision, model)
    missing = report["missing_keys"]
    rule = f"the weights of a {what} must be complete"
    value = f"{name!r} lacks {', '.join(sorted(missing))}"
    remedy = f"transformers would draw them at random; take {complete}'s files."
    require(not missing, BackboneError, rule, value, remedy)
    return model


def _check_settings(what: str, name: str, where: str, source: Mapping[str, Any]) -> None:
    """Refuse settings of generation that transformers does not take; its error names no file."""
    try:
        GenerationConfig.from_pretrained(where, **source)
    except OSError:
        return  # there are none
    except (TypeError, ValueError) as error:
        rule = f"the generation_config.json of a {what} must hold settings that go together"
        remedy = "Correct it, or leave the file out."
        raise BackboneError(rule, f"{name!r}: {first_line(error)}".rstrip("."), remedy) from error


def _check_types(where: str, revision: str | None, model: PreTrainedModel) -> None:
    """Refuse numbers of another kind in the place of weights; transformers would convert them.

    Weights that a quantiser packed are of such types; so are masks that old files hold as buffers.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return
    parameters = {name for name, _ in model.named_parameters()}
    for path in weight_files(where, revision):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                kind = str(file.get_slice(name).get_dtype())
                known = {name, f"{model.base_model_prefix}.{name}"} & parameters
                if known and not kind.startswith(("F", "BF")):
                    raise ValueError(f"weights must be floating point numbers, {name} is {kind}")


def weight_files(where: str, revision: str | None) -> list[Path]:
    """Return a model's files of weights, without asking the network."""
    config = local_file(where, "config.json", revision)
    return [] if config is None else sorted(config.parent.glob("*.safetensors"))


def frozen_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that shares the weights, needs no gradients and is in evaluation mode.

    The model itself stays as it is: its mode, what of it is trained, and its configuration. No
    weight is copied, so a step that trains the model changes the twin.
    """
    shared: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        # Quantised weights have classes of their own, and none of them is trained.
        trained = type(parameter) is nn.Parameter and parameter.requires_grad
        shared[id(parameter)] = (
            nn.Parameter(parameter.detach(), requires_grad=False) if trained else parameter
        )
    twin: PreTrainedModel = deepcopy(model, shared)
    return freeze(twin)


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model of our own into evaluation mode and let none of its weights need a gradient."""
    model.train(False).requires_grad_(False)
    return model
