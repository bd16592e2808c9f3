"""Greedy search of OpenVINO GenAI on prompts of ids, in an environment that has it.

python openvino_greedy.py MODEL.gguf < REQUEST.json > ANSWER.json

The request holds ``prompts`` and ``tokens``; its answer the ids that follow each prompt.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    request = json.load(sys.stdin)
    pipe = openvino_genai.LLMPipeline(
        sys.argv[1],
        "CPU",
        ATTENTION_BACKEND="SDPA",
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE="0",
        INFERENCE_NUM_THREADS="1",
    )
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = request["tokens"], False
    config.ignore_eos = True
    answers = []
    for ids in request["prompts"]:
        rows = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(rows), openvino.Tensor(np.ones_like(rows))
        )
        answers.append([int(token) for token in pipe.generate(inputs, config).tokens[0]])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
