"""The command line answers before it imports what an answer does not need."""

from __future__ import annotations

import sys

import pytest

from support.processes import output_of


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (("--help",), "numpy torch transformers numba pyarrow"),
        (("mine", "no.txt", "--out", "x", "--threads", "0"), "torch transformers numba pyarrow"),
        (("compress", "Return a new array."), "torch pandas scipy.sparse"),
    ],
    ids=["help", "mine", "compress"],
)
def test_nothing_heavy_is_imported_for_it(arguments: tuple[str, ...], forbidden: str) -> None:
    probe = (
        f"import sys; sys.argv = ['umim', *{arguments!r}]\n"
        "from umim_core.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {forbidden.split()!r} if m in sys.modules])"
    )
    assert output_of(sys.executable, "-c", probe).splitlines()[-1] == "[]"
