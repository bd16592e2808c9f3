"""``umim baselines``: the methods that UMIM is compared with, one line each."""

from __future__ import annotations

from dataclasses import asdict

from umim_core.cli.console_output import JsonFlag, emit


def baselines(as_json: JsonFlag = False) -> None:
    """List the baselines: token reducers, pooled embeddings, KV cache policies.

    Methods of the prompt save prefill and KV cache, those of the cache save KV cache alone.
    """
    from umim_core.baselines.listing import listed_baselines

    listed = listed_baselines()
    width = max(len(one.name) for one in listed)
    lines = [f"{one.name:<{width}}  {one.side:<6}  {one.line}" for one in listed]
    emit({"baselines": [asdict(one) for one in listed]}, lines, as_json)
