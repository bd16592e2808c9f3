"""CNN/DailyMail: summarise a news article in at most 80 tokens, greedily.

The paper merges the prompt alone: ``--model_args merge=prompt``. Its prompt is not printed; this
one is that of lm-eval's ``cnn_dailymail_abisee``.

Source: Nallapati et al., 2016; paper, "CNN/DailyMail Summarization".
"""

from __future__ import annotations

from umim_core.task_sets.generation_spec import GenerationSet, add_generation_task
from umim_core.task_sets.task_files import DataFile, HubTable

add_generation_task(
    GenerationSet(
        name="umim_cnn_dailymail",
        prompt="Summarize the following article:\n\n{article}\n\nSummary:",
        source=DataFile(
            "cnn_dailymail/test.jsonl",
            fields=("article",),
            reference="highlights",
            origin="articles of CNN/DailyMail's test split with their highlights",
            hub=HubTable("abisee/cnn_dailymail", "test", "3.0.0"),
        ),
        metrics=("rouge", "bertscore"),
        max_new_tokens=80,
        licence="Apache-2.0",
        cut="article",
    )
)
