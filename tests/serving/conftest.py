"""Models of tests, an embedded one and one with rows for spans, and the servers of both."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from support.served_models import engine_server, exported_server, gateway
from support.servers import CHATML, QUESTIONS, in_thread
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.prompt_merger import PromptMerger


@pytest.fixture(scope="session")
def umim() -> UMIM:
    """Float64: rows of a batch and rows alone get the same tokens, however they are rounded."""
    model = UMIM.from_pretrained("umim-docs-llama", dtype="float64")
    tokenizer = deepcopy(model.backbone.require_tokenizer())
    tokenizer.chat_template = CHATML
    return UMIM(replace(model.backbone, tokenizer=tokenizer), model.checkpoint)


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with rows for the pairs of tokens of the questions, which it never generates."""
    folder = tmp_path_factory.mktemp("export")
    backbone = load_backbone("umim-docs-llama")
    tokenizer = backbone.require_tokenizer()
    texts = [backbone.encode(question) for question in QUESTIONS]
    spans = {pair for ids in texts for pair in pairwise(ids)}
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint)
    size, wide = backbone.vocab_size, backbone.vocab_size + len(rules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone.model.resize_token_embeddings(wide)
    backbone.model.generation_config.suppress_tokens = list(range(size, wide))
    backbone.model.save_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    PromptMerger(rules, size, 4).write(folder)
    return folder


@dataclass(frozen=True)
class Server:
    """A server of tests: its address, the model that answers, and the address that reads ids."""

    url: str
    backbone: Backbone
    upstream: str


@pytest.fixture(scope="session")
def servers(umim: UMIM, export: Path) -> Iterator[dict[str, Server]]:
    behind = exported_server(export)
    with (
        in_thread(engine_server(umim).app(None)) as url,
        in_thread(behind.app(None)) as upstream,
        in_thread(gateway(upstream + "/v1/", export).app(None)) as front,
    ):
        served: Any = behind.engine
        yield {
            "umim serve": Server(url, umim.backbone, url),
            "gateway": Server(front, served._served.backbone, upstream),
        }


@pytest.fixture(params=["umim serve", "gateway"])
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Server:
    return servers[request.param]
