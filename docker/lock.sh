#!/usr/bin/env bash
# Resolve setup.py into the two lock files. Run after changing a requirement; needs the network and `uv`.
set -euo pipefail
cd "$(dirname "$0")/.."
common=(setup.py --extra dev --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --quiet
        --custom-compile-command "bash docker/lock.sh")
uv pip compile "${common[@]}" --extra cpu --override docker/overrides-cpu.txt -o docker/cpu.lock
uv pip compile "${common[@]}" --extra gpu -o docker/gpu.lock
