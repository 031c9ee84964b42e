#!/usr/bin/env bash
# Usage: scripts/set_up.sh LOCK
# Creates .venv in the current folder and installs LOCK into it. Every file is checked against the hash in LOCK.
#
# PYTHON  the interpreter of a new .venv (python3)
# TORCH   cuda: torch as LOCK has it (6 GB installed, most of it CUDA libraries).
#         cpu: the small CPU build of the same version. LOCK does not hold the hashes of that build:
#         torch and torchvision are pinned by version only; everything else is hash-checked.
set -euo pipefail

lock=$1
python=${PYTHON:-python3}
torch=${TORCH:-cuda}
uv_version=0.13.8

fail() {
    echo "set-up: $*" >&2
    exit 1
}

without_cuda() {
    awk '/^[a-z0-9]/ { skip = /^(torch|torchvision|triton|cuda-[^=]*|nvidia-[^=]*)==/ && !/^nvidia-ml-py==/ } !skip' "$1"
}

have_uv() {
    uv --version >/dev/null 2>&1
}

[[ $torch == cuda || $torch == cpu ]] || fail "TORCH is '$torch'; allowed: cuda, cpu"
[[ -f $lock ]] || fail "there is no $lock here: run this in the project's folder"

if [[ -f .venv/torch-build && $(<.venv/torch-build) != "$torch" ]]; then
    rm -rf .venv
fi
if [[ ! -x .venv/bin/python ]]; then
    command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11 to 3.13, or say which: PYTHON=python3.12"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$python is $("$python" --version 2>&1); Python 3.11 to 3.13 is needed: say which, as in PYTHON=python3.12"
    if have_uv; then
        uv venv --quiet --python "$(command -v "$python")" .venv
    else
        "$python" -m venv .venv
    fi
fi
echo "$torch" >.venv/torch-build

if have_uv; then
    # Compile bytecode, as pip does. Otherwise the first Ray of each node compiles everything, and its agents must be up within 30 s.
    install=(uv pip install --quiet --compile-bytecode --python .venv/bin/python)
else
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
    install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
fi

echo "set-up: installing $lock into .venv ($torch build of torch)" >&2
if [[ $torch == cuda ]]; then
    "${install[@]}" --require-hashes -r "$lock"
else
    rest=.venv/without-cuda-$(basename "$lock")
    without_cuda "$lock" >"$rest"
    "${install[@]}" --require-hashes -r "$rest"
    if have_uv; then
        uv=uv
    else
        "${install[@]}" "uv==$uv_version"
        uv=.venv/bin/uv
    fi
    # uv knows where PyTorch publishes its CPU builds. Their dependencies are already installed.
    # shellcheck disable=SC2046  # two separate words are intended
    "$uv" pip install --quiet --compile-bytecode --python .venv/bin/python --torch-backend cpu --no-deps \
        $(grep -oE '^(torch|torchvision)==[^ ;\\]+' "$lock")
fi
