"""Mathematical problems with one final answer: AIME 2024, AMC 2023, GSM8K.

AIME and AMC are asked as the paper does: 16 samples of up to 15,000 tokens, pass@k. Sampling is not
printed there; temperature 0.6 and top-p 0.95 are those of the model's authors (ours). GSM8K is
greedy. ``task_repeats`` and ``task_new_tokens`` set smaller numbers.

Source: paper, "Long-Form Mathematical Reasoning"; the prompt of GSM8K is that of lm-eval's
``gsm8k_cot_zeroshot``.
"""

from __future__ import annotations

from typing import Final

from umim_core.task_sets.generation_spec import GenerationSet, add_generation_task
from umim_core.task_sets.task_files import DataFile, HubTable

_CONTESTS: Final = {
    "aime24": "the 30 problems of AIME 2024 I and II",
    "amc23": "the 40 problems of AMC 12A and 12B of 2023 with whole numbers as answers",
}

for _name, _origin in _CONTESTS.items():
    add_generation_task(
        GenerationSet(
            name=f"umim_{_name}",
            prompt=(
                "{problem}\nLet's think step by step and output the final answer within "
                "\\boxed{{}}.\n"
            ),
            question="{problem}",
            source=DataFile(f"math/{_name}.jsonl", ("problem",), "answer", _origin),
            metrics=("math_answer",),
            max_new_tokens=15_000,
            licence="none stated; problems by the Mathematical Association of America",
            sampling={"do_sample": True, "temperature": 0.6, "top_p": 0.95},
            repeats=16,
        )
    )

add_generation_task(
    GenerationSet(
        name="umim_gsm8k",
        prompt="Q: {problem}\nA: Let's think step by step.",
        question="{problem}",
        source=DataFile(
            "math/gsm8k_test200.jsonl",
            fields=("problem",),
            reference="answer",
            origin="problems of GSM8K's test split",
            hub=HubTable("openai/gsm8k", "test", "main", {"problem": "question"}),
        ),
        metrics=("math_answer",),
        max_new_tokens=512,
        licence="MIT",
        until=("Q:",),
    )
)
