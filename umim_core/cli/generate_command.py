"""``umim generate``: continue a prompt, streamed, shown in colours, or as one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, write
from umim_core.cli.documented import AtLeast0OrNone, MaybeArgument, Page
from umim_core.config.form import Merge

if TYPE_CHECKING:
    from umim_core.model.generation_output import GenerationOutput
    from umim_core.model.inputs import PromptInput

_REPLY_TOKENS: Final = 256


def generate(
    context: typer.Context,
    prompt: MaybeArgument = None,
    *,
    model: shared.ModelOptions,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    do_sample: Annotated[bool | None, typer.Option("--sample/--greedy")] = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    stop_strings: Annotated[list[str] | None, typer.Option("--stop")] = None,
    n: Annotated[int | None, typer.Option("--samples", "-n", min=1)] = None,
    seed: int | None = None,
    merge: Merge | None = None,
    raw_tail: AtLeast0OrNone = None,
    roles: Annotated[list[str] | None, typer.Option("--role")] = None,
    tools: Path | None = None,
    decode_max_damage: float | None = None,
    span_eviction: int | None = None,
    stream: bool | None = None,
    show: bool | None = None,
    html: Page = None,
    logprobs: int | None = None,
    device: str = "cpu",
    as_json: JsonFlag = False,
) -> None:
    """Continue a prompt, or answer a message; the checkpoint says what merges, unless you do.

    With --json and several samples the fields of each stand in "samples".

    Options:
        prompt: Prompt; '-' or nothing reads stdin.
        max_new_tokens: Most tokens to generate (the model's, else 64, of a reply 256).
        chat: The prompt is a message to the model; its chat template is applied.
        system: System message of the chat; by default the template's own.
        tools: With --chat: JSON Lines or array of the tools that may be called.
        stream: Print the text as it comes; by default on a terminal, where one text is all.
        show: Show prompt and text with merged spans in colours, and the token reduction; by default
            of a chat.
        logprobs: With --json: the log-probability of each token, and so many of the most probable.
    """
    shared.check_page(html)
    several = None if n in (None, 1) else n
    if stream:
        shared.refuse_ignored({"--samples": several}, "cannot be streamed")
    if as_json:
        rule = "have no part in --json, which prints one document"
        shared.refuse_ignored({"--stream": stream, "--show": show}, rule)
    else:
        shared.refuse_ignored({"--logprobs": logprobs}, "is a field of --json")
    if not chat:
        shared.refuse_ignored(
            {"--system": system, "--tools": tools, "--role": roles}, "need --chat"
        )
    text = shared.given_text(prompt)
    prompt_input: PromptInput = text
    if chat:
        prompt_input = [{"role": "user", "content": text}]
        prompt_input[:0] = [] if system is None else [{"role": "system", "content": system}]
    from umim_core.inference.options import GenerateOptions
    from umim_core.text.documents import read_objects

    schemas = None if tools is None else [tool for _, tool in read_objects(tools)]

    # The command's options have the names of the library's; what is not given is left out.
    names = {field.name for field in fields(GenerateOptions)}
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    options = GenerateOptions(**{name: given[name] for name in names & given.keys()})
    show = chat and not stream and not as_json if show is None else show
    umim = model.load(device, merge if span_eviction is None else None)
    own = umim.backbone.model.generation_config.max_new_tokens
    if chat and max_new_tokens is None and own is None:
        options = replace(options, max_new_tokens=_REPLY_TOKENS)
    alone = several is None and not as_json and not show
    if stream or (stream is None and alone and sys.stdout.isatty()):
        out = _streamed(umim.stream(prompt_input, options, tools=schemas))
    else:
        out = umim.generate(prompt_input, options, tools=schemas)
        if not show:
            emit(_document(out), _lines(out.text), as_json)
    if show:
        out.show()
    if html is not None:
        shared.write_page(html, "umim generate", out.html())


def _streamed(steps: Generator[str, None, GenerationOutput]) -> GenerationOutput:
    """Print pieces as they come and return what they are pieces of."""
    while True:
        try:
            write(next(steps), newline=False)
        except StopIteration as end:
            write("")
            output: GenerationOutput = end.value
            return output


def _lines(texts: Sequence[str]) -> list[str]:
    if len(texts) == 1:
        return list(texts)
    heads = (f"--- {number} of {len(texts)} ---" for number in range(1, len(texts) + 1))
    return [line for pair in zip(heads, texts, strict=True) for line in pair]


def _document(out: GenerationOutput) -> dict[str, object]:
    names = (
        *("ids", "prompt_spans", "generated_spans", "token_reduction", "gen_kv_reduction"),
        *("cumulative_kv_reduction", "cache_lengths", "stop_reason"),
        *(("logprobs", "top_logprobs") if out.rows[0].logprobs is not None else ()),
    )
    samples = [
        {"text": text} | {name: getattr(row, name) for name in names}
        for text, row in zip(out.text, out.rows, strict=True)
    ]
    return {
        **(samples[0] if len(samples) == 1 else {"samples": samples}),
        "merge": out.merge,
        "raw_tail": out.raw_tail,
        "span_eviction": out.options.span_eviction,
        "unmerged": out.unmerged[0],
        "timings": asdict(out.timings),
    }
