"""Addresses of database files: read as SQLAlchemy does; one that cannot be opened is one line."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from tasks.run.services import local_services
from tasks.tracking import tracker as tracking
from tasks.tracking.mlflow_store import Store
from tasks.tracking.tracker import Tracker
from tasks.tracking.tracking_values import sqlite_address

ODD = ["a%20b", "a b", "a?b", "a#b", "a%3Fb", "a@b:c+d", "ä"]


@pytest.mark.parametrize("folder", ODD)
def test_default_databases_lie_in_their_folder_whatever_its_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / folder
    place.mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "CHECKOUT", place)
    services = {service.name: service.command for service in local_services(place)}
    for address in (Tracker().uri, services["mlflow"][-1]):
        assert make_url(address).database == str(place / "mlflow.db")


def test_records_and_locks_lie_where_sqlalchemy_opens_the_file(
    tmp_path: Path, empty_store: Path
) -> None:
    place = tmp_path / "a%20b?c"
    place.mkdir()
    (place / "m.db").write_bytes(empty_store.read_bytes())
    with Store(sqlite_address(place / "m.db"), tmp_path / "root").session(60, 5, 5) as opened:
        run = opened.ensure("stage", "k" * 64, "count", {}, time_ms=1)
        assert opened.find("stage", "k" * 64, {}) == run
    names = {path.name for path in place.iterdir()}
    assert names == {"m.db", "m.db.lock", "m.db.connecting.lock"}


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("sqlite:///{0}/ml%201/m.db", "{0}/ml 1/m.db"),
        ("sqlite:///{0}/ml?1/m.db", "{0}/ml"),
        ("sqlite:////proc/m.db", "/proc/m.db"),
        ("sqlite:////proc/none/m.db", "/proc/none"),
        ("sqlite:////dev/full/m.db", "/dev/full"),
        ("sqlite:///{0}", "{0}"),
        ("sqlite:///{0}/text", "{0}/text"),
        ("sqlite+pysqlite:////proc/m.db", "/proc/m.db"),
        ("sqlite://user:word@host/m.db", "sqlite://***@host/m.db"),
        ("sqlite:/m.db", "sqlite:/m.db"),
        ("postgresql+nodriver://me:word@127.0.0.1:9/x", "postgresql+nodriver://***@127.0.0.1:9/x"),
    ],
)
def test_a_database_that_cannot_be_opened_is_one_line_in_seconds(
    address: str,
    named: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # m.db of an address with a host is a file of this folder
    (tmp_path / "ml%201").mkdir()
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml?1").mkdir()
    (tmp_path / "text").write_text("no database " * 100)
    tracker = Tracker(address.format(tmp_path), tmp_path / "root")
    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        tracker.pipeline_run("p", {})
        tracker.points("p", [("live/kl", 0, 0.0)])
    assert time.monotonic() - began < 10
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("MLflow is away, the run goes on") and "\n" not in line
    assert named.format(tmp_path) in line and "word" not in line
