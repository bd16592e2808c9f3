from __future__ import annotations

import socket

import pytest
from huggingface_hub.errors import HTTPError

from umim_core.errors import CorpusError
from umim_core.text.sources import HubDataset, source_digests

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub whose port is closed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


def data_set(revision: str | None) -> HubDataset:
    return HubDataset(kind="dataset", name="owner/name", revision=revision)


@pytest.mark.usefixtures("no_hub")
def test_a_data_set_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(CorpusError, match="or pinned by its revision; got owner/name") as told:
        source_digests(data_set(None))
    assert isinstance(told.value.__cause__, HTTPError), "a connection was tried"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("revision", [COMMIT, "v1.0"])
def test_a_revision_stands_for_a_data_set_that_cannot_be_reached(revision: str) -> None:
    assert source_digests(data_set(revision)) == [revision]


def test_a_pinned_commit_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}"
        )
        assert source_digests(data_set(COMMIT)) == [COMMIT]
        with pytest.raises(BlockingIOError):
            hub.accept()
