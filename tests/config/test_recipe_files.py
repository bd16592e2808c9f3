"""Recipes that nobody means well: each is one typed line, soon, in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from umim_core.config.recipe_files import load_any_recipe, read_recipe_file
from umim_core.errors import ConfigError

BOMB = "".join(f"  - &l{n} [{','.join([f'*l{n - 1}'] * 10) if n else 'x'}]\n" for n in range(9))
CHAIN = "".join(f"k{n}: &k{n} {{x: *k{n - 1}, y: *k{n - 1}}}\n" for n in range(1, 17))
MERGES = "".join(f"k{n}: &k{n} {{<<: [{f'*k{n - 1}, ' * 10}]}}\n" for n in range(1, 17))
HOSTILE = {
    # name: (text, what the error says)
    "anchors": (f"name: s\ncells:\n{BOMB}", "corpus must be given"),
    "anchors in mappings": (f"k0: &k0 {{b: 1}}\n{CHAIN}", "must be given"),
    "merged anchors": (f"k0: &k0 {{b: 1}}\n{CHAIN.replace('x:', '<<:')}", "must be given"),
    "lists of merged anchors": (f"k0: &k0 {{b: 1}}\n{MERGES}", "must be given"),
    "aliases": (f"a: &a b\nc: [{'*a, ' * 257}]\n", "must hold 256 aliases at most"),
    "an anchor in itself": ("name: &a [*a]\n", "name must be text"),
    "brackets": ("name: " + "[" * 3_000 + "]" * 3_000, "values nested too deeply"),
    "open brackets": ("name: " + "[" * 200_000, "values nested too deeply"),
    "digits": (f"seed: {'9' * 5_001}\n", "line 1, column 7: a number must have 99 digits at most"),
    "digits of base 16": (f"seed: 0x{'f' * 99}\n", "a number must have 99 digits at most"),
    "a python tag": ("name: !!python/object/apply:os.system [exit]\n", "tags are not read"),
    "a tag of an empty number": ('seed: !!int ""\n', "tags are not read"),
    "a tag of no value": ("seed: !!int x\n", "tags are not read"),
    "a merge of no mapping": ("a: &a [b]\nc: {<<: *a}\n", "line 1, column 8: .* a mapping"),
    "a merge with itself": ("a: &a {<<: *a}\n", "must be given"),
    "two merges": ("a: &a {b: 1}\nc: {<<: *a, <<: *a}\n", "<< is given twice"),
    "a lone surrogate": ('name: "\\ud800"\n', "must be text without lone surrogates"),
    "a surrogate key": ('"\\ud800": 1\n', "must be text without lone surrogates"),
    "NUL": ("name: a\0b\n", "must be YAML"),
    "a key of a list": ("? [a]\n: b\n", "a key must be a word"),
    "a list": ("- a\n", "r.yaml must be a mapping"),
    "a text": ("text", "r.yaml must be a mapping"),
    "nothing": ("", "r.yaml must be a mapping"),
    "an open list": ("a: [1", "must be YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "expected a single document"),
    "an unknown alias": ("a: *b\n", "undefined alias"),
    "a long file": ("#" * (1 << 19), "more than 262,144 bytes"),
    "a key given twice": ("seed: 1\n\nseed: 2\n", "line 3, column 1: seed is given twice"),
    "a quoted key given twice": ("a: 1\n'a': 1\n", "a is given twice, first in line 1"),
    "a key given twice in a flow": ("a: {b: 1, b: 2}\n", "b is given twice, first in line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_one_typed_line(tmp_path: Path, name: str) -> None:
    text, message = HOSTILE[name]
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as found:
        load_any_recipe(path)
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 1_000
    str(found.value).encode()


def test_they_take_seconds_and_little_memory(tmp_path: Path) -> None:
    for number, (text, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.yaml").write_text(text, encoding="utf-8")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from umim_core.config.recipe_files import load_any_recipe\n"
        "from umim_core.errors import ConfigError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF)\n"
        "for path in Path(sys.argv[1]).iterdir():\n"
        "    try: load_any_recipe(path)\n"
        "    except ConfigError: pass\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(after.ru_maxrss - before.ru_maxrss, after.ru_utime - before.ru_utime)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    kibibytes, seconds = map(float, done.stdout.split())
    assert kibibytes < 200 << 10
    assert seconds < 30


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"name: \xff\n", "byte 7 of it is not UTF-8"),
        (b"\xff\xfen\0", "byte 1 of it is not UTF-8"),
        (b"a: \x1b[2J", "special characters"),
    ],
)
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "r.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=f"must be YAML; got .*{message}"):
        load_any_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "fifo", ".", "loop", "file/x"])
def test_what_is_no_file_is_refused(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be YAML; got"):
        read_recipe_file(tmp_path / place)


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: small\n", encoding="utf-8-sig")
    assert isinstance(found := read_recipe_file(tmp_path / "r.yaml"), dict)
    assert found["name"] == "small"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("+3", 3), ("0", 0), ("0o17", 15), ("0xfF", 255),
        ("1.5", 1.5), ("1.", 1.0), (".5", 0.5), ("8e-4", 8e-4), ("8.0e-4", 8e-4), ("1E3", 1e3),
        (".inf", float("inf")), ("-.Inf", float("-inf")),
        ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        ("yes", "yes"), ("No", "No"), ("on", "on"), ("off", "off"), ("y", "y"), ("nan", "nan"),
        ("2020-01-01", "2020-01-01"), ("'010'", "010"), ('"1:30"', "1:30"), ("1_a", "1_a"),
        ("1.2.3", "1.2.3"), ("v1:30", "v1:30"), ("umim-docs-llama", "umim-docs-llama"),
        ('{<<: {b: 1}, c: 2}', {"b": 1, "c": 2}), ('{"<<": {b: 1}}', {"<<": {"b": 1}}),
        ("[1, a]", [1, "a"]), ("&a b", "b"), ("|\n  010\n", "010\n"), ("_", "_"), ("=", "="),
    ],
)  # fmt: skip
def test_words_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "r.yaml").write_text(f"a: {text}\n")
    found = read_recipe_file(tmp_path / "r.yaml")
    assert found == {"a": value} and type(found["a"]) is type(value)


@pytest.mark.parametrize(
    "number",
    ["010", "00", "-07", "08", "1:30", "190:20:30.15", "1_000", "1_0.5", "0b11", "0x_f", "010.5",
     "+1_0", "0_1"],
)  # fmt: skip
def test_numbers_of_yaml_1_1_are_refused(tmp_path: Path, number: str) -> None:
    (tmp_path / "r.yaml").write_text(f"a:\n- {number}\n")
    with pytest.raises(ConfigError, match=r"line 2, column 3: .* is one number in YAML 1\.1"):
        read_recipe_file(tmp_path / "r.yaml")
