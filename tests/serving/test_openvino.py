"""OpenVINO GenAI reads an exported GGUF file and writes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines import OPENVINO, SCRIPT
from support.exported_models import Exported
from support.processes import output_of
from umim_core import UMIM
from umim_core.serving.model_export import export_model
from umim_core.serving.prompt_merger import PromptMerger


@pytest.mark.skipif(not OPENVINO.exists(), reason="needs `tools/engine.sh openvino` (0.3 GB)")
def test_greedy_search_writes_the_ids_that_transformers_does(
    exported: Exported, tmp_path: Path
) -> None:
    umim = UMIM.from_pretrained(exported.checkpoint, dtype="float16")  # it reads no other floats
    export_model(umim, exported.umim.rules, tmp_path / "model", gguf=True)
    merger = PromptMerger.load(tmp_path / "model")
    prompts = [merger.merge(ids) for ids in exported.prompts(4)]
    assert sum(map(len, prompts)) < 4 * 120 * 0.9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # neither engine stops early
    wanted = [
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]
    asked = json.dumps({"prompts": prompts, "tokens": 16})
    printed = output_of(OPENVINO, SCRIPT, tmp_path / "model" / "model.gguf", stdin=asked)
    assert [ids for ids, _, _ in json.loads(printed.splitlines()[-1])] == wanted
