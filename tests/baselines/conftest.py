"""The backbones of the token reducers."""

from __future__ import annotations

import pytest

from support.reduced_texts import FAMILIES, word_backbone
from umim_core.backbone.backbone import Backbone


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    """Each family in turn."""
    return word_backbone(request.param)
