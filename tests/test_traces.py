from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from support.traces import CANARIES, Descendants, traces
from tasks.cluster.ray_cluster import require_loopback
from umim_core.errors import ClusterError

OPEN = """
import socket
with socket.create_server(("0.0.0.0", 0)):
    print("open", flush=True)
    input()
"""


def test_a_secret_in_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"\0..." + CANARIES["HF_TOKEN"].encode() + b"...")
    (tmp_path / "basic").write_bytes(base64.b64encode(CANARIES["AWS_SECRET_ACCESS_KEY"].encode()))
    (tmp_path / "harmless").write_text("hf_hub_download")
    found = traces([tmp_path], CANARIES)
    assert [name for name, _ in found] == ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN"]


def test_an_open_socket_a_command_line_and_a_variable_of_a_child_are_seen() -> None:
    watch = Descendants("UMIM_TEST_VARIABLE")
    with (
        watch,
        subprocess.Popen(
            [sys.executable, "-c", OPEN, "canary"],
            env={"UMIM_TEST_VARIABLE": "value"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child,
    ):
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        watch.look()
        child.communicate(b"\n")
    assert watch.values == {"value"}
    assert any(line.endswith("canary") for line in watch.command_lines)
    with pytest.raises(ClusterError, match=r"python.* on 0\.0\.0\.0"):
        require_loopback(watch.sockets)
