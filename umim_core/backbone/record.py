"""Record of a checkpoint's backbone, so that a mismatch can be explained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, JsonValue

from umim_core.store.artifacts import canonical_json

if TYPE_CHECKING:
    from umim_core.backbone.backbone import Backbone


class BackboneRecord(BaseModel):
    """Configuration and weights' digest that a backbone's fingerprint was made of.

    Attributes:
        model_type: Its family.
        config: Its configuration, as far as it decides what is computed.
        weights: SHA-256 over its tensors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    config: dict[str, JsonValue]
    weights: str

    @classmethod
    def of(cls, backbone: Backbone) -> BackboneRecord:
        """Record a backbone."""
        identity = backbone.identity
        return cls(
            model_type=identity.model_type,
            config=json.loads(canonical_json(identity.function)),
            weights=identity.weights_digest,
        )
