"""Adapters of an exported model, and the names that only vLLM's plugin has.

The file has the format of safetensors, not its suffix, for the reason of ``umim_spans.table``. It
holds a pair per linear map of a layer, all layers in one, float32::

    self_attn.q_proj.down [layers, in, r]    self_attn.q_proj.up [layers, r, out]    mlp ...

An engine that does not know them would read merged spans wrongly and say nothing. So the model's
configuration names a type and an architecture that the plugin alone registers; others refuse it.
The plugin imports this module, which must not load numba, hence not ``span_files``, at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from umim_core.errors import ArtifactError
from umim_core.store.artifacts import sha256_file, write_json
from umim_core.store.disk import write_bytes

if TYPE_CHECKING:
    from umim_core.merging.adapters import SpanAdapters

# Model types whose adapters vLLM's plugin applies, and the architecture that it registers for each.
ARCHITECTURES: Final = {"llama": "UmimLlamaForCausalLM", "qwen2": "UmimQwen2ForCausalLM"}
TYPE: Final = "umim_{}"  # model_type of a configuration with adapters
_CONFIG: Final = "config.json"
_REMEDY: Final = "Export the model again."


def write_adapters(directory: Path, adapters: SpanAdapters, model_type: str) -> None:
    """Write adapters next to a model, and let its configuration name their architecture.

    The record of its spans is written after this; the model's type is a key of ``ARCHITECTURES``.
    """
    from umim_core.serving.span_files import ADAPTERS

    tensors = {
        f"{name.replace('-', '.')}.{part}": matrices.detach().float().cpu().contiguous()
        for part, by_name in (("down", adapters.down), ("up", adapters.up))
        for name, matrices in by_name.items()
    }
    write_bytes(directory / ADAPTERS, save(tensors))
    config = json.loads((directory / _CONFIG).read_bytes())
    names = {"model_type": TYPE.format(model_type), "architectures": [ARCHITECTURES[model_type]]}
    write_json(directory / _CONFIG, config | names)


def read_adapters(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices [layers, in, r] and [layers, r, out] of each linear map by its name."""
    from umim_core.serving.span_files import ADAPTERS, RECORD, read_record

    path = directory / ADAPTERS
    digest = sha256_file(path) if path.is_file() else "no file"
    if digest != read_record(directory).files.get(ADAPTERS):
        raise ArtifactError(f"{path} must have the SHA-256 that {RECORD} says", digest, _REMEDY)
    try:
        tensors = load_file(path)
        names = [name.removesuffix(".down") for name in tensors if name.endswith(".down")]
        return {name: (tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{path} must hold pairs of matrices", str(error), _REMEDY) from error
