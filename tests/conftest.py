"""Shared fixtures: seeded generators, a tokenizer, two tiny backbones and a merge checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings

from umim_core.store.locking import VARIABLE

if TYPE_CHECKING:  # the process that only hands tests to others imports no torch
    import torch
    from transformers import PreTrainedTokenizerFast

    from support.tiny_pipeline import Walk
    from umim_core import UMIM
    from umim_core.backbone.backbone import Backbone

pytest_plugins = ["support.shared_services"]
# A test on a busy machine is slow, not wrong.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("full", deadline=None, max_examples=50)
settings.load_profile("quick")
FAMILIES = ("gpt2", "llama")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "not full":  # what pyproject.toml says
        settings.load_profile("full")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported out of the garbage collector: a million objects, read ten times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def machine_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests wait for no run outside of them that measures or computes."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, str(tmp_path_factory.mktemp("machine") / "lock"))
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator of numpy."""
    return np.random.default_rng(20251120)


@pytest.fixture
def torch_rng() -> torch.Generator:
    """A seeded generator of torch."""
    import torch

    return torch.Generator().manual_seed(20251120)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The words w1 .. w31 and the special token ``<eos>`` with id 0."""
    from support.tiny_models import word_tokenizer

    return word_tokenizer(["<eos>", *(f"w{i}" for i in range(1, 32))])


@pytest.fixture(scope="session", params=FAMILIES)
def tiny_backbone(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast
) -> Backbone:
    """Each tiny backbone in turn, float32, with the tiny tokenizer."""
    from support.tiny_models import tiny_model
    from umim_core.backbone.backbone import wrap_backbone

    return wrap_backbone(tiny_model(request.param), tiny_tokenizer, name=f"tiny-{request.param}")


@pytest.fixture(scope="session")
def tiny_llama(tiny_tokenizer: PreTrainedTokenizerFast) -> Backbone:
    """The tiny Llama: rotary positions, grouped queries, untied head."""
    from support.tiny_models import tiny_model
    from umim_core.backbone.backbone import wrap_backbone

    return wrap_backbone(tiny_model(), tiny_tokenizer, name="tiny-llama")


@pytest.fixture(scope="session")
def tokenizer_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """The tokenizer's files."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """Random weights for a backbone of 64 positions; w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge.

    It recommends to merge everywhere.
    """
    from support.merged_models import fresh_model
    from support.tiny_models import tiny_model
    from umim_core.backbone.backbone import load_backbone
    from umim_core.checkpoint.checkpoint import Checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder / "backbone")
    tiny_tokenizer.save_pretrained(folder / "backbone")
    backbone = load_backbone(str(folder / "backbone"))
    made = Checkpoint.of(fresh_model(backbone, [(1, 2), (3, 4, 5), (6, 7, 8, 9)]))
    made.recommending("all").save(folder / "merge")
    return folder / "merge"


@pytest.fixture(scope="session")
def tiny_umim(tiny_checkpoint: Path) -> UMIM:
    """The model of ``tiny_checkpoint``."""
    from umim_core import UMIM

    return UMIM.from_pretrained(tiny_checkpoint, dtype="float32")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a file system of a size in bytes, or resize it."""
    from support.faulty_disk import small_file_system

    with small_file_system(tmp_path) as resize:
        yield resize


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """A run of every stage on a tiny model (see ``tiny_pipeline``), built once; leave it alone."""
    from support.tiny_pipeline import (  # it imports the whole pipeline
        save_backbone,
        tiny_recipe,
        walk,
    )

    folder = tmp_path_factory.mktemp("run")
    run = walk(folder / "root", tiny_recipe(save_backbone(folder / "backbone")))
    run.report()
    return run
