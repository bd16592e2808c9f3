"""Logits behind a context that a press shortened, in an environment that has kvpress.

python kvpress_logits.py MODEL RULES OUT.npz < REQUEST.json

The request holds the ids ``context`` and ``question``; OUT gets ``logits`` and the ``columns``.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from umim_core.serving.kvpress_press import SpanEvictionPress


@torch.no_grad()
def main() -> None:
    model_path, rules, out = sys.argv[1:]
    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    context, question = (torch.tensor([request[name]]) for name in ("context", "question"))
    cache = DynamicCache()
    with SpanEvictionPress(rules)(model):
        model(input_ids=context, past_key_values=cache)
    columns = cache.get_seq_length()
    places = torch.arange(question.shape[1])[None] + context.shape[1]
    logits = model(input_ids=question, past_key_values=cache, position_ids=places).logits
    np.savez(out, logits=logits[0].numpy(), columns=columns)


if __name__ == "__main__":
    main()
