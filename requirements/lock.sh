#!/usr/bin/env bash
# Rebuild build.txt, lock.txt, gpu.txt, docs.txt and server.txt from pyproject.toml. Called by
# `make lock`.
#
#   lock.sh PIP_COMPILE [--upgrade]
#
# pip-compile starts from the versions that lock.txt already holds, so the same pyproject.toml gives
# the same file; --upgrade takes the newest versions that fit. It writes the hash of every file of a
# release, not only of the one for this machine, and no index address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pip_compile=$1
shift
options=(--quiet --generate-hashes --strip-extras --no-header --annotation-style line
    --no-emit-options --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
    --constraint requirements/torch.txt --unsafe-package torch --unsafe-package triton)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Keep the pinned blocks NAME==VERSION \ --hash ... of the packages named by a pattern.
blocks() { awk -v names="^($1)==" '/^[^ #]/ {keep = $0 ~ names} keep && !/^ *#/' "$2"; }

cp requirements/lock.txt "$scratch/lock.txt"
"$pip_compile" "${options[@]}" "$@" --output-file "$scratch/lock.txt" \
    --extra pipeline --extra s3 --extra serve --extra eval --extra bench --extra dev \
    pyproject.toml
{
    cat <<'EOF'
# Made by `make lock`; do not edit. Every dependency of the project and its extras pipeline, s3, serve,
# eval, bench and dev at one version, with the hash of every file of that release, so that the
# same lock serves each platform that has wheels. Resolved for Python 3.11 on Linux.
# torch is not here: see torch.txt. liger-kernel (extra gpu) is in gpu.txt.
EOF
    sed '/^# WARNING/,$d' "$scratch/lock.txt" | sed -e '${/^$/d}'
} >"$scratch/lock.new"
{
    echo '# Made by `make lock` from lock.txt; do not edit. Builds the source distributions in lock.txt.'
    blocks 'packaging|setuptools|wheel' "$scratch/lock.new"
} >"$scratch/build.new"

grep -o 'liger-kernel[^"]*' pyproject.toml >"$scratch/gpu.in"
[ ! -e requirements/gpu.txt ] || cp requirements/gpu.txt "$scratch/gpu.txt"
"$pip_compile" "${options[@]}" "$@" --output-file "$scratch/gpu.txt" "$scratch/gpu.in"
{
    cat <<'EOF'
# Made by `make lock`; do not edit. Extra gpu: install with --no-deps --require-hashes beside a CUDA
# build of torch, which brings the triton that belongs to it.
EOF
    blocks liger-kernel "$scratch/gpu.txt"
} >"$scratch/gpu.new"

grep -o 'mkdocs-material[^"]*' pyproject.toml >"$scratch/docs.in"
[ ! -e requirements/docs.txt ] || cp requirements/docs.txt "$scratch/docs.txt"
"$pip_compile" "${options[@]}" "$@" --output-file "$scratch/docs.txt" "$scratch/docs.in"
{
    echo '# Made by `make lock`; do not edit. Extra docs, for the environment of `make docs` alone.'
    blocks '.*' "$scratch/docs.txt"
} >"$scratch/docs.new"

grep -oE '(psycopg2-binary|ray\[default\])[^"]*' pyproject.toml >"$scratch/server.in"
[ ! -e requirements/server.txt ] || cp requirements/server.txt "$scratch/server.txt"
"$pip_compile" "${options[@]}" "$@" --constraint "$scratch/lock.new" \
    --output-file "$scratch/server.txt" "$scratch/server.in"
{
    cat <<'EOF'
# Made by `make lock` from lock.txt; do not edit. Extra server: what the images of infra/docker install
# beside the lock, with --no-deps --require-hashes.
EOF
    locked=$(grep -oE '^[a-z0-9._-]+==' "$scratch/lock.new" | sed 's/==$//' | paste -sd '|')
    awk -v names="^($locked)==" '/^[^ #]/ {keep = $0 !~ names} keep && !/^ *#/' \
        "$scratch/server.txt"
} >"$scratch/server.new"

for name in lock build gpu docs server; do
    mv "$scratch/$name.new" "requirements/$name.txt"
done
