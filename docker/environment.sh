#!/usr/bin/env bash
# Make `.venv` in the repository root, or bring it up to date, from a pinned lock file. Called by train_ppo.sh, tests/run.sh
# and docker/Dockerfile. With everything in place it compares a stamp and ends, without asking the network.
#
#   VRL_DEVICE=auto|cpu|cuda   lock file to install (auto: cuda where the NVIDIA driver shows a GPU)
#   VRL_PYTHON=PATH            interpreter for a new environment (default: the first of python3.11, python3.12, ... that runs)
#
# The stamp is written last. After an install that was broken off, the environment is made anew from what uv's cache holds
# (a package cut off half-way looks installed). A file lock lets one install run at a time.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.vrl-complete"
started="$venv/.vrl-started"
log="$venv/.vrl-install.log"
cache="${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/uv}"
uv_version=0.13.9
oldest=11 # of Python 3; the lock files hold for all from this to `newest`

say() { printf 'vrl: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

choose_device() {
    case "${VRL_DEVICE:-auto}" in
        cpu | cuda) device="$VRL_DEVICE" ;;
        auto)
            device=cpu
            if compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null; then
                device=cuda
            elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
                device=cuda
            fi
            ;;
        *) fail "VRL_DEVICE is '$VRL_DEVICE'; it can be auto, cpu or cuda" ;;
    esac
    if [[ "$device" == cpu ]]; then
        lock=docker/cpu.lock need_gib=10 newest=13
    else
        lock=docker/gpu.lock need_gib=15 newest=12
    fi
}

# Everything an environment depends on. The path is in it because scripts in `.venv/bin` name it.
wanted_stamp() {
    printf 'device %s\nroot %s\n' "$device" "$root"
    (cd "$root" && sha256sum "$lock" setup.py)
}

in_place() {
    [[ -x "$python" && -x "$venv/bin/vrl" && -r "$stamp" && "$(<"$stamp")" == "$(wanted_stamp)" ]]
}

# The minor version of a Python 3 that runs; nothing for other commands (pyenv puts some on PATH that only say no).
minor_version() {
    "$1" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else 0)' 2>/dev/null || true
}

fits() {
    local minor
    minor="$(minor_version "$1")"
    [[ -n "$minor" ]] && ((oldest <= minor && minor <= newest))
}

find_python() {
    local found="" range="3.$oldest to 3.$newest"
    if [[ -n "${VRL_PYTHON:-}" ]]; then
        found="$("$VRL_PYTHON" --version 2>&1 | tail -n 1 || true)"
        fits "$VRL_PYTHON" || fail "VRL_PYTHON=$VRL_PYTHON is no Python $range that runs; it says: $found"
        base="$VRL_PYTHON"
        return
    fi
    for base in python3.11 python3.12 python3.13 python3 python; do
        ! fits "$base" || return 0
        found="${found:-$("$base" --version 2>/dev/null || true)}"
    done
    fail "vrl needs Python $range and found ${found:-none}; install python3.11 or set VRL_PYTHON=/path/to/python3.11"
}

# False for an environment of an older Python, of another folder, or without a working interpreter.
usable() {
    fits "$python" &&
        grep -qsF -e "VIRTUAL_ENV=$venv" -e "VIRTUAL_ENV=\"$venv" -e "VIRTUAL_ENV='$venv" "$venv/bin/activate"
}

# Room for what is still to come, on the disk of the environment and on that of uv's cache if it is another one.
check_space() {
    local place free have file_system seen=""
    mkdir -p "$cache" || fail "uv's cache folder $cache cannot be made; set UV_CACHE_DIR to a folder that can be written"
    for place in "$venv" "$cache"; do
        read -r file_system free < <(df -Pk "$place" | awk 'NR == 2 { print $1, $4 }')
        [[ "$file_system" != "$seen" ]] || continue
        seen="$file_system"
        have="$(du -sk "$place" | cut -f1)"
        ((free + have >= need_gib * 1048576)) ||
            fail "the $device environment takes about $need_gib GiB; the disk of $place has only $((free / 1048576)) GiB free"
    done
}

# pycosat (wanted by reasoning-gym) comes as C source; on a GPU, Triton and FlashInfer compile kernels while running.
check_compiler() {
    local include cc minor
    include="$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    cc="${CC:-$("$base" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}"
    minor="$(minor_version "$base")"
    command -v "${cc%% *}" >/dev/null ||
        fail "no C compiler ('${cc%% *}'), and some packages are built from source; install gcc and g++, or set CC"
    [[ "$device" == cpu ]] || command -v g++ >/dev/null || command -v c++ >/dev/null ||
        fail "no C++ compiler, and GPU kernels are compiled while running; install g++"
    printf '#include <Python.h>\n' | $cc -I"$include" -E -xc - >/dev/null 2>&1 ||
        fail "the C compiler does not find Python.h in $include; install the headers (Debian, Ubuntu: python3.$minor-dev)"
}

# Everything goes but the file on which others may be waiting and the sign that an install has begun.
make_empty() {
    say "making $venv with $("$base" --version) ($base)"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .vrl-lock ! -name .vrl-started -exec rm -rf {} +
    "$base" -m venv "$venv" >"$log" 2>&1 ||
        { [[ -n "$uv" ]] && "$base" -m venv --without-pip "$venv"; } ||
        fail "$base cannot make a virtual environment (Debian, Ubuntu: install python3.$(minor_version "$base")-venv); see $log"
}

# Run an install step. A failure is tried once more, since what was downloaded is kept; the second one is explained in a line.
step() {
    "$@" >&2 && return
    say "that failed; trying once more"
    "$@" 2>&1 | tee "$log" >&2 && return
    local again="run the same command again and it goes on where it stopped"
    local network='dns error|name resolution|failed to lookup|unreachable|refused|timed out|error sending request'
    network+='|new connection|connection (error|reset|aborted)|failed to connect'
    if grep -qiE 'no space left|quota exceeded' "$log"; then
        fail "the disk is full ($venv or $cache); free some space, then $again"
    elif grep -qiE "$network" "$log"; then
        fail "the package index could not be reached; check the network, then $again"
    elif grep -qiE 'failed to build' "$log"; then
        fail "a package could not be built from source (its compiler's message is above and in $log); repair that, then $again"
    fi
    fail "the install failed (above and in $log); $again"
}

# What runs code that models write is a system package. Without it such rows are left out, and all else goes on.
add_bubblewrap() {
    command -v bwrap >/dev/null && return
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        say "installing bubblewrap, in which code that models write runs"
        { apt-get install -y bubblewrap || { apt-get update && apt-get install -y bubblewrap; }; } >"$log" 2>&1 || true
    fi
    command -v bwrap >/dev/null ||
        say "bubblewrap is missing, so code that models write cannot run (Debian, Ubuntu: apt-get install bubblewrap)"
}

install_all() {
    uv="$(command -v uv || true)"
    [[ -z "$uv" ]] || "$uv" --version >/dev/null 2>&1 || uv=""
    if [[ ! -e "$started" ]] && usable; then base="$python"; else find_python; fi
    [[ -e "$started" ]] || check_space # after a broken-off install part of it is in uv's cache
    check_compiler
    touch "$started"
    rm -f "$stamp"
    [[ "$base" == "$python" ]] || make_empty
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-120}" PIP_DISABLE_PIP_VERSION_CHECK=1
    if [[ -z "$uv" ]]; then
        uv="$venv/bin/uv"
        [[ -x "$uv" ]] || step "$python" -m pip install --quiet --retries 2 "uv==$uv_version"
    fi
    say "installing $lock (the first time some GB and some minutes)"
    step "$uv" pip sync --python "$python" "$lock"
    step "$uv" pip install --python "$python" --quiet --no-deps --no-build-isolation --editable .
    add_bubblewrap
    wanted_stamp >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm -f "$started"
    say "the $device environment is complete"
}

choose_device
in_place && exit
[[ "$(uname -s)" == Linux ]] || fail "the lock files are for Linux, this is $(uname -s); use a Linux machine or container"
cd "$root"
mkdir -p "$venv" || fail "$root cannot be written to"
exec 9>"$venv/.vrl-lock"
if ! flock --nonblock 9; then
    say "waiting for another install in $venv"
    flock 9
fi
in_place || install_all
