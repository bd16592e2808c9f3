"""Credentials of addresses: refused in a root, and shown nowhere."""

from __future__ import annotations

import sys

import pytest

from support.processes import run_command
from umim_core.addresses import has_credentials, redacted, scrubbed
from umim_core.checkpoint.checkpoint_index import artifact_root, local_root, remote_address
from umim_core.errors import ConfigError

SECRET = "TOPSECRET"
MANY = [f"http://h{'://a:b' * (1 << 16)}{end}" for end in ("", "?@")]  # each may begin a user


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://AK:SK@bucket/key?region=x", "s3://***@bucket/key?region=x"),
        ("s3://AK:S/K+@bucket/k@y", "s3://***@y"),
        ("hdfs://host:9000/a@b", "hdfs://host:9000/a@b"),
        ("s3://b/k?region=x&session_token=abc&y=1", "s3://b/k?region=x&session_token=***&y=1"),
        ("az://c/k?sv=1&sig=abc%3D", "az://c/k?sv=1&sig=***"),
        ("cache::s3://AK:SK@b/k", "cache::s3://***@b/k"),
        ("a:b@c/d", "a:b@c/d"),
    ],
)
def test_addresses_are_shown_without_credentials(name: str, safe: str) -> None:
    assert redacted(name) == safe


@pytest.mark.parametrize(
    ("text", "addresses", "safe"),
    [
        ("at http://me:p@ss@host:5000/x now", (), "at http://***@host:5000/x now"),
        ("postgresql+psycopg2://me:a/b+c@db/x", (), "postgresql+psycopg2://***@db/x"),
        ("no bucket 'AKID:S%2FK'", ("s3://AKID:S%2FK@b/p",), "no bucket '***'"),
        ("no bucket AKID:S/K", ("s3://AKID:S%2FK@b/p",), "no bucket ***"),
        ("no host S%2FK", ("s3://AKID:S/K@b/p",), "no host ***"),
        ("no key abc in p", ("s3://b/p?secret=abc",), "no key *** in p"),
        ("the method is missing", ("http://me:pw@host",), "the method is missing"),
        ("1://me:pw@h", (), "1://***@h"),
        *((long, (), long) for long in ("QUJD" * (1 << 18), "http://h/" + "?key" * 4000)),
        *((long, (long,), long) for long in MANY),
    ],
    ids=lambda part: repr(part)[:30],
)
def test_texts_of_other_libraries_lose_credentials(
    text: str, addresses: tuple[str, ...], safe: str
) -> None:
    assert scrubbed(text, *addresses) == safe


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "abfs", "file", "local", "memory", "x+s3"])
@pytest.mark.parametrize(
    "rest",
    [
        f"KEY:{SECRET}@bucket/p",
        f"KEY:TOP/{SECRET}@bucket/p",
        f"{SECRET}@bucket@x/p",
        f"KEY%3A{SECRET}%40bucket/p",
        f"bucket/p?secret={SECRET}",
        f"bucket/p?x={SECRET}",
        f"bucket/p#{SECRET}",
    ],
)
def test_credentials_in_a_root_are_refused_and_not_shown(
    scheme: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", f"{scheme}://{rest}")
    for read in (remote_address, artifact_root, local_root):
        with pytest.raises(ConfigError, match="without a user, a password and options") as caught:
            read()
        assert SECRET not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/p", "gs://bucket/a@b", "abfs://box@account.dfs.core.windows.net/p", "s3://b:1/p"],
)
def test_a_root_without_credentials_is_read(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMIM_ROOT", address)
    assert remote_address() == address
    assert not has_credentials(MANY[0])  # a long text without a user


@pytest.mark.parametrize(
    "address", ["https://host/p", "http://host", "memory://p", "file:///p", "s3://", "gs:///p"]
)
def test_a_root_that_is_no_bucket_of_an_object_storage_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", address)
    with pytest.raises(ConfigError, match="must be a directory or s3://bucket/prefix, gs://"):
        remote_address()


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("flows store ls", {"UMIM_ROOT": f"s3://AKIAX:{SECRET}@bucket/p"}),
        (
            "flows store ls",
            {
                "UMIM_ROOT": "s3://bucket/p",
                "AWS_ENDPOINT_URL": f"http://me:{SECRET}@127.0.0.1:9",
                "AWS_ACCESS_KEY_ID": "AKIAX",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_MAX_ATTEMPTS": "1",
            },
        ),
        ("flows deploy", {"PREFECT_API_URL": f"http://me:{SECRET}@127.0.0.1:9/api"}),
        ("umim path", {"UMIM_ROOT": f"gs://KEY:{SECRET}@bucket"}),
    ],
)
def test_a_command_prints_one_line_without_the_secret(
    command: str, variables: dict[str, str]
) -> None:
    words = command.split()
    umim = [sys.executable, "-c", "from umim_core.cli.app import main; main()"]
    start = umim if words[0] == "umim" else [sys.executable, "-m", words[0]]
    done = run_command(*start, *words[1:], **variables)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "error:" in line
    assert SECRET not in done.stdout + line
