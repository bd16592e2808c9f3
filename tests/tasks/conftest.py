"""Fixtures of the tests of several stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.tiny_generation import tiny_generated_corpus
from umim_core.config.corpus import GeneratedCorpus


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> GeneratedCorpus:
    """A corpus that a tiny model generates; files about other corpora define their own."""
    folder = tmp_path_factory.mktemp("corpus")
    return tiny_generated_corpus(folder, tiny_model("llama", 0), tiny_tokenizer)


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """The address of an empty store of one's own."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
