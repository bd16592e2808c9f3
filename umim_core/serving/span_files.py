"""Files of an exported model beside its weights: its spans, and adapters of them if it has any.

``umim_spans.table`` and ``umim_adapters.table`` have the format of safetensors, not its suffix:
vLLM reads every such file next to a model as weights. The first holds ``ids`` int32 [K, N] (-1
behind a span's end, N the most tokens of one, 4 to 16) and ``lengths`` int8 [K]; row i is the span
of the id ``vocab_size + i``, rows sorted by length, then ids. The second holds a pair per linear
map of a layer, all layers in one, float32: ``self_attn.q_proj.down`` [layers, in, r],
``self_attn.q_proj.up`` [layers, r, out], ...

``umim_spans.json`` says whose ids they are and how prompts merge, with the SHA-256 of the tables
and of the tokenizer::

    {"format": 1, "policy": 1, "vocab_size": 49152, "spans": 8192, "raw_tail": 16,
     "tokenizer_fingerprint": "5b09...", "files": {"umim_spans.table": "e3b0...", ...}}

An engine that does not know adapters would read merged spans wrongly and say nothing. So the
model's configuration then names a type and an architecture that vLLM's plugin alone registers. The
plugin imports this module: numba, which rules load, must not come with it. The table is read and
written by ``prompt_merger``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, Strict
from safetensors import SafetensorError

from umim_core.errors import ArtifactError, require
from umim_core.store.artifacts import described, read_json, sha256_file, write_json
from umim_core.store.disk import write_bytes
from umim_core.text.roles import USER, Role

if TYPE_CHECKING:
    from torch import Tensor

    from umim_core.merging.adapters import SpanAdapters

RECORD: Final = "umim_spans.json"
TABLE: Final = "umim_spans.table"
TOKENIZER: Final = "tokenizer.json"
ADAPTERS: Final = "umim_adapters.table"
# Model types whose adapters vLLM's plugin applies, and the architecture that it registers for each.
ARCHITECTURES: Final = {"llama": "UmimLlamaForCausalLM", "qwen2": "UmimQwen2ForCausalLM"}
TYPE: Final = "umim_{}"  # model_type of a configuration with adapters
_CONFIG: Final = "config.json"
REMEDY: Final = "Export the model again."


_One = Annotated[int, Field(ge=1, le=1)]  # a literal would take true


class SpanRecord(BaseModel):
    """Content of ``umim_spans.json``, see above.

    ``policy`` 1: longest span first, left to right, every part of a prompt on its own. ``roles``
    and ``raw_tail`` say what these parts are, unless a caller does.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: _One
    policy: _One
    vocab_size: PositiveInt  # rows V of the model before the export; span i has the id V + i
    spans: PositiveInt
    raw_tail: NonNegativeInt
    tokenizer_fingerprint: str
    files: dict[str, str]
    roles: Annotated[tuple[Role, ...], Strict(False), Field(exclude_if=USER.__eq__)] = USER


def read_record(directory: Path) -> SpanRecord:
    """Return the record of a model's spans, whose table must be the one that it is of."""
    path, remedy = directory / RECORD, f"{REMEDY} Or use the version of umim that wrote it."
    with described(f"{path} must describe the spans of a model", remedy):
        record = SpanRecord.model_validate(read_json(path))
    _check_digest(directory / TABLE, record)
    return record


def _check_digest(path: Path, record: SpanRecord) -> None:
    digest = sha256_file(path) if path.is_file() else "no file"
    rule = f"{path} must have the SHA-256 that {RECORD} says"
    require(digest == record.files.get(path.name), ArtifactError, rule, digest, REMEDY)


def write_adapters(directory: Path, adapters: SpanAdapters, model_type: str) -> None:
    """Write adapters next to a model, and let its configuration name their architecture.

    The record of its spans is written after this; the model's type is a key of ``ARCHITECTURES``.
    """
    from safetensors.torch import save as save_tensors

    tensors = {
        f"{name.replace('-', '.')}.{part}": matrices.detach().float().cpu().contiguous()
        for part, by_name in (("down", adapters.down), ("up", adapters.up))
        for name, matrices in by_name.items()
    }
    write_bytes(directory / ADAPTERS, save_tensors(tensors))
    config = json.loads((directory / _CONFIG).read_bytes())
    names = {"model_type": TYPE.format(model_type), "architectures": [ARCHITECTURES[model_type]]}
    write_json(directory / _CONFIG, config | names)


def read_adapters(directory: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices [layers, in, r] and [layers, r, out] of each linear map by its name."""
    from safetensors.torch import load_file as load_tensors

    path = directory / ADAPTERS
    _check_digest(path, read_record(directory))
    try:
        tensors = load_tensors(path)
        names = [name.removesuffix(".down") for name in tensors if name.endswith(".down")]
        return {name: (tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{path} must hold pairs of matrices", str(error), REMEDY) from error
