"""Forms as configurations name them: what exists, what is dumped, what labels say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from support.merge_modules import FORMS
from umim_core.config.form import ModuleForm, check_form
from umim_core.errors import ConfigError

WRONG = {
    "positions": (
        ("rotary", 1, "attention", "none"),
        "positions must be 'none' or 'learned'; got rotary",
    ),
    "depth": (("none", 2, "attention", "none"), "depth must be 1 or 3; got 2"),
    "kind": (("none", 1, "mean", "none"), "kind must be one of attention, linear; got mean"),
    "linear, learned": (
        ("learned", 1, "linear", "none"),
        "linear .*; got positions 'learned', depth 1",
    ),
    "linear, deep": (("none", 3, "linear", "none"), "linear .*; got positions 'none', depth 3"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_dumped_and_read_back(form: dict[str, Any]) -> None:
    found = ModuleForm(**form)
    assert found.form() == {"positions": "none", **form}
    assert ModuleForm.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(("form", "message"), WRONG.values(), ids=WRONG)
def test_a_form_that_does_not_exist_is_refused(
    form: tuple[str, int, str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_form(*form)


def test_unit_positions_are_part_of_the_form_and_dumped_where_they_deviate() -> None:
    found = ModuleForm(unit_positions="preserved")
    assert found.form() == {"positions": "none", "unit_positions": "preserved"}
    assert ModuleForm.model_validate_json(found.model_dump_json()) == found
    assert ModuleForm(unit_positions="compact").model_dump() == {"positions": "none"}
    with pytest.raises(ValidationError, match="'compact' or 'preserved'"):
        ModuleForm(unit_positions="restarted")
