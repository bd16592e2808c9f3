"""Every refusal of an option, at the public door; what a model says where a caller does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig, TextStreamer

from umim_core import UMIM
from umim_core.errors import UmimError
from umim_core.inference.options import GenerateOptions

TEXT = "w1 w2 w9 w3 w4 w5"


def config(**settings: object) -> GenerationConfig:
    """A configuration that transformers' own constructor would not let pass."""
    made = GenerationConfig(max_new_tokens=2)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "out of range; got .max_new_tokens. must be greater than 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer; got 1.5"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer; got True"),
    ({"config": config(max_new_tokens="2")}, "out of range"),
    ({"config": {"max_new_tokens": 3}}, "a GenerationConfig of transformers; got dict"),
    ({"config": config(), "n": 2}, r"in config or as options, not both; got \['n'\]"),
    ({"config": config(), "top_k": None}, r"in config or as options, not both; got \['top_k'\]"),
    ({"config": config(), "generation_config": config()}, "once; got generation_config and config"),
    ({"config": config(num_beams=4)}, "num_beams"),
    ({"config": config(num_beams=2, diversity_penalty=1.0)}, "diversity_penalty"),
    ({"config": config(max_length=20)}, "max_length"),
    ({"config": config(num_return_sequences=2)}, "num_return_sequences"),
    ({"config": config(do_sample=True, top_p=1.5)}, "top_p is out of range"),
    ({"config": config(do_sample=True, top_k=-2)}, "top_k is out of range"),
    ({"num_beams": 2}, "beam search is not supported; got num_beams"),
    ({"n": "2"}, "n must be an integer"),
    ({"n": 2}, "Greedy methods .* do not support .num_return_sequences."),
    ({"n": 0, "do_sample": True}, "num_return_sequences must be 1"),
    ({"n": 2, "num_return_sequences": 2}, "must be given once"),
    ({"temperature": 0.5}, r"need do_sample; got \['temperature'\]"),
    ({"top_k": 3, "min_p": 0.1, "do_sample": False}, r"got \['top_k', 'min_p'\]"),
    ({"temperature": -1.0, "do_sample": True}, "out of range"),
    ({"min_p": "0.9", "do_sample": True}, "sampling setting min_p is out of range: .* got .0.9."),
    ({"stop_strings": 5}, r"texts of at least one character; got \[5\]"),
    ({"stop_strings": [""]}, "at least one character"),
    ({"eos_token_id": 1.5}, "one id or several; got 1.5"),
    ({"eos_token_id": "w1"}, "one id or several; got w1"),
    ({"seed": -1}, "a seed must be an integer of at least 0; got -1"),
    ({"seed": 1.0}, "a seed must be an integer"),
    ({"merge": "some"}, "merge must be one of"),
    ({"raw_tail": -1}, "raw_tail must be an integer of at least 0; got -1"),
    ({"raw_tail": 3, "merge": "none"}, "raw_tail needs a prompt that is merged"),
    ({"decode_max_damage": math.nan}, "a number of nats per saved token"),
    ({"decode_max_damage": "0.2"}, "a number of nats per saved token"),
    ({"decode_max_damage": 0.2, "merge": "prompt"}, "needs merging .* got merge 'prompt'. Merge"),
    ({"decode_max_damage": 0.2}, r"rules without prices\. Measure them: umim prune"),
    ({"span_eviction": -1, "merge": "none"}, "integer of at least 0; got -1"),
    ({"span_eviction": 2, "merge": "all"}, "reads prompt and generated tokens raw; got merge"),
    ({"overlong": "extend"}, "overlong must be one of"),
    ({"logprobs": -1}, "logprobs must be an integer of at least 0"),
    ({"logprobs": 99}, "logprobs must lie between 0 and"),
    ({"logits_processor": print}, "logits_processor must be a list"),
    ({"stopping_criteria": print}, "stopping_criteria must be a list"),
    ({"past": "state"}, "past must be a state or a prefix; got str"),
    ({"max_tokens": 3}, "unknown option 'max_tokens'; known are .*max_new_tokens"),
    ({"match_border": True}, "unknown option 'match_border'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_an_option_that_cannot_be_honoured_is_refused(
    tiny_umim: UMIM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UmimError, TypeError), match=message):
        tiny_umim.generate(TEXT, **options)


def test_a_streamer_takes_one_row_and_none_of_its_own(tiny_umim: UMIM) -> None:
    streamer = TextStreamer(tiny_umim.tokenizer)
    with pytest.raises(UmimError, match="a streamer takes one row; got 2 rows"):
        tiny_umim.generate([TEXT, TEXT], streamer=streamer)
    with pytest.raises(UmimError, match="stream yields the text itself"):
        next(tiny_umim.stream(TEXT, streamer=streamer))


def test_options_are_one_value_that_names_change(tiny_umim: UMIM) -> None:
    options = GenerateOptions(max_new_tokens=5, merge="none", eos_token_id=np.array([1, 2]))
    out = tiny_umim.generate(TEXT, options)
    assert out == tiny_umim.generate(TEXT, max_new_tokens=5, merge="none", eos_token_id=[1, 2])
    assert tiny_umim.generate(TEXT, options, merge="all").merge == "all"
