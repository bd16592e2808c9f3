"""``umim serve``: what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest

from support.servers import COMPLETIONS, Served, piece
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.cli.serve_command import set_template


def test_a_template_of_windows_is_read_without_its_mark(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "chat.jinja", load_tokenizer("umim-docs-llama")
    file.write_bytes(b"\xef\xbb\xbf{{ messages }}")
    set_template(tokenizer, file)
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.full
def test_a_server_that_is_ended_lets_its_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMIM_TEST_TOKEN", "secret")
    server = Served("umim-docs-llama", "--host", "127.0.0.1", "--api-key-env", "UMIM_TEST_TOKEN")
    body = {"prompt": "Return a private thing", "max_tokens": 40, "temperature": 0, "stream": True}
    key = {"authorization": "Bearer secret"}
    try:
        assert httpx.get(server.url + "/v1/models").status_code == 401
        text, lines = "", 0
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json=body, headers=key, timeout=120
        ) as answer:
            for line in answer.iter_lines():
                if not lines:
                    server.process.send_signal(signal.SIGTERM)
                lines += 1
                if line.startswith("data: {"):
                    text += "".join(map(piece, json.loads(line[6:])["choices"]))
            assert line == "" or line == "data: [DONE]"
        assert len(text) > 40
        assert server.end() == -signal.SIGTERM  # uvicorn raises it again when it is done
    finally:
        server.process.kill()
    said = "".join(server.lines)
    assert '"path": "/v1/completions", "status": 200' in said
    assert "private" not in said and "secret" not in said and "Traceback" not in said
