"""``umim generate``: continue a prompt, streamed, shown in colours, or as one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, write
from umim_core.errors import ConfigError

if TYPE_CHECKING:
    from umim_core.model.generation_output import GenerationOutput
    from umim_core.model.inputs import PromptInput

_TEXT_TOKENS: Final = 64
_REPLY_TOKENS: Final = 256


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; '-' or nothing reads stdin.")
    ] = None,
    checkpoint: shared.CheckpointOption = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="The prompt is a message to the model; its chat template is applied."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of the chat; by default the template's own.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate. [default: 64; a reply: 256]")
    ] = None,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--sample/--greedy", help="Sample or not; by default as the model's own settings say."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; by default the model's own, else 1.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample from the k most probable; by default the model's own, else 50."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            callback=shared.number, help="Nucleus probability; by default the model's own, else 1."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 repeats less; by default the model's own, else 1.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be given several times.")
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="Texts; more than one need sampling.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Sampling seed; by default every call samples anew.")
    ] = None,
    merge: shared.MergeOption = None,
    raw_tail: shared.RawTailOption = None,
    decode_max_damage: Annotated[
        float | None,
        typer.Option(
            help="Merge generated tokens only by rules of at most this price, in nats per saved "
            "token; inf: by all. [default: the checkpoint's]"
        ),
    ] = None,
    span_eviction: Annotated[
        int | None,
        typer.Option(
            help="With --merge none: read everything raw, and keep of a rule's span only the last "
            "column of the KV cache once it is so many tokens old."
        ),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print the text as it comes; by default on a terminal, where one text is all.",
        ),
    ] = None,
    show: Annotated[
        bool | None,
        typer.Option(
            "--show/--no-show",
            help="Show prompt and text with merged spans in colours, and the token reduction; by "
            "default of a chat.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML view here.")] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Add log-probabilities and so many alternatives; with --json."),
    ] = None,
    budget: shared.BudgetOption = None,
    target_tr: shared.TargetOption = None,
    dtype: shared.DtypeOption = "auto",
    device: shared.DeviceOption = "cpu",
    special_tokens: shared.SpecialTokensOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Continue a prompt, or answer a message; the checkpoint says what merges, unless you do.

    With --json and several samples the fields of each stand in "samples".
    """
    _check(stream=stream, show=show, logprobs=logprobs, samples=samples, as_json=as_json)
    _check_sampling(do_sample, samples, temperature=temperature, top_k=top_k, top_p=top_p)
    if system is not None and not chat:
        raise ConfigError("a system message belongs to a chat", f"--system {system}", "Add --chat.")
    text = shared.given_text(prompt)
    prompt_input: PromptInput = _messages(text, system) if chat else text
    if show is None:
        show = chat and not stream and not as_json
    if max_new_tokens is None:
        max_new_tokens = _REPLY_TOKENS if chat else _TEXT_TOKENS
    from umim_core.inference.options import GenerateOptions

    options = GenerateOptions(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k="model" if top_k is None else top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        stop_strings=stop,
        n=samples,
        seed=seed,
        merge=merge,
        raw_tail=raw_tail,
        decode_max_damage=decode_max_damage,
        span_eviction=span_eviction,
        logprobs=logprobs,
    )
    umim = shared.load_umim(checkpoint, dtype, device, budget, target_tr)
    alone = samples == 1 and not as_json and not show
    if stream or (stream is None and alone and sys.stdout is not None and sys.stdout.isatty()):
        out = _streamed(umim.stream(prompt_input, options, add_special_tokens=special_tokens))
    else:
        out = umim.generate(prompt_input, options, add_special_tokens=special_tokens)
        if not show:
            emit(_document(out), _lines(out.text), as_json)
    if show:
        out.show()
    if html is not None:
        shared.write_page(html, "umim generate", out.html())


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    """Return a chat of one message, behind a system message if there is one."""
    message = {"role": "user", "content": text}
    return [message] if system is None else [{"role": "system", "content": system}, message]


def _check(
    *, stream: bool | None, show: bool | None, logprobs: int | None, samples: int, as_json: bool
) -> None:
    """Refuse ways of printing that exclude each other."""
    if stream and samples > 1:
        raise ConfigError(
            "--stream prints one text as it comes", f"--samples {samples}", "Leave one of them out."
        )
    if as_json and (stream or show):
        raise ConfigError(
            "--json prints one document and nothing else",
            "--stream" if stream else "--show",
            "Leave one of them out.",
        )
    if logprobs is not None and not as_json:
        raise ConfigError(
            "log-probabilities are printed as JSON", f"--logprobs {logprobs}", "Add --json."
        )


def _check_sampling(
    do_sample: bool | None,
    samples: int,
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Refuse settings of sampling with --greedy; the model's own settings are not known yet."""
    if do_sample is not False:
        return
    settings = {
        f"--samples {samples}": samples > 1,
        f"--temperature {temperature}": temperature is not None,
        f"--top-k {top_k}": top_k is not None,
        f"--top-p {top_p}": top_p is not None,
    }
    unused = ", ".join(name for name, is_given in settings.items() if is_given)
    if unused:
        raise ConfigError(
            "greedy decoding gives one text and draws nothing", unused, "Say --sample."
        )


def _streamed(steps: Generator[str, None, GenerationOutput]) -> GenerationOutput:
    """Print pieces as they come and return what they are pieces of."""
    while True:
        try:
            piece = next(steps)
        except StopIteration as end:
            write("")
            output: GenerationOutput = end.value
            return output
        write(piece, newline=False)


def _lines(texts: Sequence[str]) -> list[str]:
    if len(texts) == 1:
        return list(texts)
    total = len(texts)
    return [
        line
        for number, text in enumerate(texts, start=1)
        for line in (f"--- {number} of {total} ---", text)
    ]


def _document(out: GenerationOutput) -> dict[str, object]:
    samples = [_sample(out, row) for row in range(len(out.text))]
    timings = {"first_token": out.timings.first_token, "decode": out.timings.decode}
    body = samples[0] if len(samples) == 1 else {"samples": samples}
    ways = {"merge": out.merge, "raw_tail": out.raw_tail, "span_eviction": out.span_eviction}
    return {**body, **ways, "timings": timings}


def _sample(out: GenerationOutput, row: int) -> dict[str, object]:
    sample: dict[str, object] = {
        "text": out.text[row],
        "ids": list(out.ids[row]),
        "prompt_spans": [list(span) for span in out.prompt_spans[row]],
        "generated_spans": [list(span) for span in out.generated_spans[row]],
        "token_reduction": out.token_reduction[row],
        "gen_kv_reduction": out.gen_kv_reduction[row],
        "cumulative_kv_reduction": out.cumulative_kv_reduction[row],
        "cache_lengths": list(out.cache_lengths[row]),
        "stop_reason": out.stop_reasons[row],
    }
    if out.logprobs is not None and out.top_logprobs is not None:
        sample["logprobs"] = list(out.logprobs[row])
        sample["top_logprobs"] = [[list(pair) for pair in step] for step in out.top_logprobs[row]]
    return sample
