"""QMSum: answer a query about a meeting from its transcript, which is cut to the context.

Source: Zhong et al., 2021; prompt and length of answers are LongBench's (Bai et al.,
2024).
"""

from __future__ import annotations

from umim_core.task_sets.generation_spec import GenerationSet, add_generation_task
from umim_core.task_sets.task_files import DataFile

add_generation_task(
    GenerationSet(
        name="umim_qmsum",
        prompt=(
            "You are given a meeting transcript and a query containing a question or instruction. "
            "Answer the query in one or more sentences.\n\n"
            "Transcript:\n{transcript}\n\n"
            "Now, answer the query based on the above meeting transcript in one or more "
            "sentences.\n\n"
            "Query: {query}\nAnswer:"
        ),
        question="{query}",
        source=DataFile(
            "qmsum/qmsum_val10.jsonl",
            fields=("transcript", "query"),
            reference="answer",
            origin="ten meetings of QMSum's validation split with their general queries",
        ),
        metrics=("rouge",),
        max_new_tokens=512,
        licence="MIT",
        cut="transcript",
    )
)
