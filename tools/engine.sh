#!/bin/sh
# Install an engine that tests and benchmarks compare with, from the package index, in an
# environment of its own: tools/engine.sh openvino
# $UMIM_ENGINES, by default ~/.cache/umim/engines, holds one folder for each.
set -eu
engines=${UMIM_ENGINES:-$HOME/.cache/umim/engines}
case ${1:-} in
openvino) packages="openvino-genai==2026.4.1.0" ;; # 0.3 GB
*)
    echo "usage: tools/engine.sh openvino" >&2
    exit 2
    ;;
esac
mkdir -p "$engines"
"${PYTHON:-python3}" -m venv "$engines/$1"
"$engines/$1/bin/pip" install $packages
