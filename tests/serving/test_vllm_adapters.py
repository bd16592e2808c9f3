"""vLLM applies the adapters of merged spans as our own engine does, and leaves raw tokens alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.engines import CONTEXT, SERVERS, Running, running
from support.gguf_files import tiny_bpe
from support.merged_models import random_merged_model
from support.processes import need_model
from support.servers import COMPLETIONS
from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.model_export import export_model
from umim_core.serving.prompt_merger import PromptMerger

VLLM = SERVERS["vllm"]
PROMPTS, TOKENS, TOP = 8, 16, 20
EXACT, CLOSE = 1e-5, 1e-3  # of log-probabilities

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM.program.exists(), reason="needs `tools/engine.sh vllm` (2.5 GB)"),
]


@dataclass(frozen=True)
class Answer:
    """Ids of greedy search, and the most probable ids of each step with log-probabilities."""

    ids: list[int]
    top: list[dict[int, float]]

    def off(self, other: Answer) -> float:
        """Return the largest difference of a log-probability that both hold."""
        pairs = list(zip(self.top, other.top, strict=True))
        assert all(len(a.keys() & b.keys()) >= TOP - 3 for a, b in pairs)  # ties at the end
        return max(abs(a[i] - b[i]) for a, b in pairs for i in a.keys() & b.keys())


@dataclass(frozen=True)
class Case:
    """A model with adapters, exported; our engine without them; the base model; raw prompts."""

    umim: UMIM
    bare: UMIM
    export: Path
    base: Path
    prompts: list[list[int]]

    def merged(self) -> list[list[int]]:
        merger = PromptMerger.load(self.export)
        merged = [merger.merge(ids) for ids in self.prompts]
        assert all(max(ids) >= merger.vocab_size for ids in merged)
        return merged

    def wanted(self, model: UMIM) -> list[Answer]:
        """What our engine writes; prompts merged as the export says."""
        options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
        found = model.generate(self.prompts, merge="prompt", raw_tail=16, logprobs=TOP, **options)
        return [
            Answer(list(map(int, ids)), [{int(i): float(p) for i, p in step} for step in top])
            for ids, top in zip(found.ids, found.top_logprobs or (), strict=True)
        ]


def tiny(family: str) -> tuple[Backbone, RuleSet, list[list[int]]]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tiny_bpe())))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    backbone = random_backbone(
        family,
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        **sizes,
    )
    draw = np.random.default_rng(0)
    spans = {tuple(map(int, draw.integers(8, 20, n))) for n in (2, 2, 3, 4) for _ in range(40)}
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint)
    return backbone, rules, [draw.integers(8, 20, 150).tolist() for _ in range(PROMPTS)]


def smollm2() -> tuple[Backbone, RuleSet, list[list[int]]]:
    need_model()
    backbone = load_backbone("smollm2-135m-instruct", dtype="float32")
    text = "\n".join(
        path.read_text("utf-8") for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))
    )
    ids = backbone.encode(text)
    pairs = {(a, b) for a, b in zip(ids[:4000:7], ids[1:4001:7], strict=True)}
    pairs = {pair for pair in pairs if not backbone.special_ids & set(pair)}
    starts = range(0, PROMPTS * 400, 400)
    rules = RuleSet.from_spans(pairs, backbone.tokenizer_fingerprint)
    return backbone, rules, [ids[start : start + 300] for start in starts]


@pytest.fixture(scope="module", params=["llama", "qwen2", "smollm2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    backbone, rules, prompts = smollm2() if request.param == "smollm2" else tiny(request.param)
    umim, bare = (
        UMIM(
            backbone,
            Checkpoint.of(random_merged_model(backbone, Matcher(rules), 0, rank, 0, "compact")),
        )
        for rank in (4, 0)
    )
    export_model(umim, rules, folder / "model")
    backbone.model.save_pretrained(folder / "base")
    backbone.require_tokenizer().save_pretrained(folder / "base")
    return Case(umim, bare, folder / "model", folder / "base", prompts)


def serving(
    directory: Path, log: Path, *more: object, without: Sequence[str] = ()
) -> AbstractContextManager[Running]:
    """vLLM's server with further options, or without some of its own."""

    def command(folder: Path, port: int) -> Sequence[object]:
        return [word for word in (*VLLM.command(folder, port), *more) if word not in without]

    return running(replace(VLLM, command=command), directory, log.open("wb"))


def asked(server: Running, prompts: list[list[int]], threads: int) -> list[Answer]:
    """Answers to prompts of ids, some of them at once."""

    def answer(ids: list[int]) -> Answer:
        fields = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "logprobs": TOP}
        form = {"return_tokens_as_token_ids": True}
        choice: dict[str, Any] = server.post(COMPLETIONS, fields | form | VLLM.ids)["choices"][0]
        steps = choice["logprobs"]["top_logprobs"]
        named = [{int(n.removeprefix("token_id:")): p for n, p in step.items()} for step in steps]
        return Answer(choice["token_ids"], named)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(answer, prompts))


def test_merged_prompts_are_read_as_our_engine_reads_them(case: Case, tmp_path: Path) -> None:
    """One after the other, from the prefix cache, and in pieces of mixed batches."""
    wanted, merged = case.wanted(case.umim), case.merged()
    adapted = [answer.ids for answer in wanted]
    assert [answer.ids for answer in case.wanted(case.bare)] != adapted
    pieces = ("--max-num-batched-tokens", 64)
    with serving(case.export, tmp_path / "log", *pieces) as server:
        for threads in (1, 1, 4):
            found = asked(server, merged, threads)
            assert [answer.ids for answer in found] == adapted
            assert max(map(Answer.off, found, wanted)) <= CLOSE
        raw = asked(server, case.prompts, 1)
    with serving(
        case.base, tmp_path / "log", *pieces, without=("--tokenizer-mode", "umim")
    ) as base:
        plain = asked(base, case.prompts, 1)
    assert [answer.ids for answer in raw] == [answer.ids for answer in plain]
    assert max(map(Answer.off, raw, plain)) <= EXACT
