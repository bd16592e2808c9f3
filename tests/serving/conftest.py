"""Models of tests, an embedded one and one with rows for spans, and the servers of both."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.merged_models import fresh_model
from support.served_models import engine_server, exported_server, gateway
from support.servers import CHATML, QUESTIONS, in_thread
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.serving.model_export import export_model


@pytest.fixture(scope="session")
def umim() -> UMIM:
    """Float64: rows of a batch and rows alone get the same tokens, however they are rounded."""
    model = UMIM.from_pretrained("umim-docs-llama", dtype="float64")
    tokenizer = deepcopy(model.backbone.require_tokenizer())
    tokenizer.chat_template = CHATML
    return UMIM(replace(model.backbone, tokenizer=tokenizer), model.checkpoint)


@pytest.fixture(scope="session")
def pairs(umim: UMIM) -> UMIM:
    """A model whose spans are the pairs of tokens of the questions, as embeddings."""
    texts = [umim.backbone.encode(question) for question in QUESTIONS]
    spans = {pair for ids in texts for pair in pairwise(ids)}
    return UMIM(umim.backbone, Checkpoint.of(fresh_model(umim.backbone, spans)))


@pytest.fixture(scope="session")
def export(pairs: UMIM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    export_model(pairs, pairs.rules, folder, raw_tail=4)
    return folder


@dataclass(frozen=True)
class Server:
    """A server of tests: its address, the model it answers as, and the backbone that runs."""

    url: str
    umim: UMIM
    backbone: Backbone


@pytest.fixture(scope="session")
def servers(umim: UMIM, pairs: UMIM, export: Path) -> Iterator[dict[str, Server]]:
    behind = exported_server(export)
    with (
        in_thread(engine_server(umim).app(None)) as url,
        in_thread(behind.app(None)) as upstream,
        in_thread(gateway(upstream + "/v1/", export).app(None)) as front,
    ):
        served: Any = behind.engine
        yield {
            "umim serve": Server(url, umim, umim.backbone),
            "gateway": Server(front, pairs, served._served.backbone),
        }


@pytest.fixture(params=["umim serve", "gateway"])
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Server:
    return servers[request.param]
