"""Pages of the benchmarks of merged prompts: quality at a saving, and answers that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.report.page_template import Report, page, walk


def _answer_sides(report: Report) -> Iterator[Report]:
    """Yield the sides of every list of questions."""
    for found in walk(report, "lists.*list"):
        for side, figures in found["sides"].items():
            yield figures | {"side": side, "list": found["list"], "accepted": found["accepted"]}


def _lost(report: Report) -> Iterator[Report]:
    """Yield the answers of merged sides that lost their key word, beside the base model's."""
    for found in walk(report, "lists.*list"):
        for row in found["rows"]:
            base = row["sides"]["base"]
            for side, said in row["sides"].items():
                if base["accepted"] and not said["accepted"]:
                    yield {
                        "question": row["id"],
                        "side": side,
                        "answer": _short(said["answer"]),
                        "base": _short(base["answer"]),
                    }


def _short(text: str) -> str:
    """Return the beginning of an answer on one line, without what a table would read."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 80 else f"{line[:79]}…"


ANSWERS: Final = page(
    """\
# Answers kept by merged prompts: {checkpoint}

Backbone *{backbone}*, {rules:,} rules, {dtype}, greedy, at most {new_tokens} new tokens. The list
is `benchmarks/answers`: chats, and questions on documents of 600 to 3,000 tokens. An answer of the
base model is accepted if it holds a key word of its question; a side keeps it if its own answer
does, too. *Saving*: share of the prompt's layer-tokens that nobody computes. Only what the user
says merges; *raw tail*: its last tokens that stay raw. Truncation drops the first tokens of what
the user says, to the saving of raw tail 16.

@ sides
questions              | {list}
side                   | {side}
accepted of the base   | {accepted}
kept                   | {kept}
share                  | {share:.0%}
saving                 | {saving:.1%}

## Answers that were lost

@ lost
question  | {question}
< side    | {side}
< answer  | {answer}
< base    | {base}

Measured, and this page written, by `python -m benchmarks.answers`.
""",
    sides=_answer_sides,
    lost=_lost,
)
MERGED_QUALITY: Final = page("""\
# What merging costs at a saving: {backbone}, {text_name}

{text.rows} windows of {window} tokens (ids {text.digest:.12}), {dtype}. *Saving*: share of
layer-tokens that nobody computes or keeps, TR (L - k) / L at merge depth k of L layers. *KL* and
*Top-1* over every state that decoding passes through; *PPL ratio*: perplexity over that of the base
model ({ppl_base:.2f}), paired by window, ± its standard error.

@ subjects.*name
checkpoint      | {name}
rules           | {rules:,}
TR              | {token_reduction:.1%}
saving          | {saving:.1%}
KL              | {kl:.3f}
Top-1           | {top1:.3f}
PPL ratio       | {ppl_ratio:.3f}

Behind prompts: the first half of a window is merged but for its last {raw_tail} tokens, and the
second half is scored raw (base model: {ppl_half_base:.2f}). *Truncation* drops as many tokens of
the first half as are saved.

@ subjects.*name
checkpoint                | {name}
TR of the prompt          | {prompt_token_reduction:.1%}
saving                    | {prompt_saving:.1%}
PPL ratio                 | {prompt_ppl_ratio:.3f}
PPL ratio of truncation   | {truncation_ppl_ratio:.3f}

Measured, and this page written, by `python -m benchmarks.merged_quality`.
""")
