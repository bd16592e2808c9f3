"""Forms as configurations name them: what exists, what is dumped, what labels say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from support.merge_modules import FORMS
from umim_core.config.form import ModuleForm


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_dumped_and_read_back(form: dict[str, Any]) -> None:
    found = ModuleForm(**form)
    assert found.form() == {"positions": "none", **form}
    assert ModuleForm.model_validate_json(found.model_dump_json()) == found


def test_unit_positions_are_part_of_the_form_and_dumped_where_they_deviate() -> None:
    found = ModuleForm(unit_positions="preserved")
    assert found.form() == {"positions": "none", "unit_positions": "preserved"}
    assert ModuleForm.model_validate_json(found.model_dump_json()) == found
    assert ModuleForm(unit_positions="compact").model_dump() == {"positions": "none"}
    with pytest.raises(ValidationError, match="'compact' or 'preserved'"):
        ModuleForm(unit_positions="restarted")
