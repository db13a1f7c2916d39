#!/usr/bin/env bash
# Train: bash train_ppo.sh [--config-name NAME] [key=value ...]
# Makes the environment the first time (docker/environment.sh), then runs `vrl train` in the folder it was called from.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
bash "$root/docker/environment.sh"
exec "$root/.venv/bin/vrl" train "$@"
