"""Devices: one check tells what this machine has, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.devices import default_device, fastest_dtype, float64_device, has_device
from umim_core.errors import ConfigError


@pytest.mark.parametrize(("name", "place"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")])
def test_a_device_without_float64_computes_it_on_the_cpu(name: str, place: str) -> None:
    assert float64_device(torch.device(name)) == torch.device(place)


@pytest.mark.parametrize("name", ["cudaa", "cuda:99", "cpu:7", "meta", ""])
def test_what_nothing_can_run_on_is_no_device(name: str) -> None:
    assert not has_device(name)


def test_without_a_gpu_the_processor_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert default_device() == "cpu"


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cudaa"])
def test_a_backbone_on_a_device_that_is_not_there_is_refused_before_it_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = rf"^device must be cpu: there is no usable GPU; got {name}\. Choose"
    with pytest.raises(ConfigError, match=message):
        load_backbone("no-such-backbone", device=name)


@pytest.mark.parametrize(
    ("flags", "supported", "fastest"),
    [
        ({"avx512f", "avx512_bf16"}, True, "bfloat16"),
        ({"amx_bf16"}, True, "bfloat16"),
        ({"asimd", "bf16"}, True, "bfloat16"),
        ({"avx512f"}, True, "float32"),  # torch would imitate it
        ({"avx512_bf16"}, False, "float32"),
        (set(), True, "float32"),
    ],
)
def test_a_processor_with_instructions_for_bfloat16_takes_it(
    flags: set[str], supported: bool, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umim_core.backbone.devices.processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert fastest_dtype("cpu") == fastest
