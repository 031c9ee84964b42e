#!/usr/bin/env bash
# Usage: scripts/set_up.sh LOCK
# Create .venv in the current folder and install LOCK into it. Every file is checked against its hash in LOCK.
#
# PYTHON  interpreter for a new .venv (default: python3)
# TORCH   cuda (default): torch as in LOCK (6 GB installed, mostly CUDA libraries).
#         cpu: the small CPU build of the same version. Its hashes differ and are not in LOCK, so torch and torchvision
#         are only pinned by version. All other packages are hash-checked.
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
[[ -f $lock ]] || fail "$lock not found; run this in the project folder"

if [[ -f .venv/torch-build && $(<.venv/torch-build) != "$torch" ]]; then
    rm -rf .venv
fi
if [[ ! -x .venv/bin/python ]]; then
    command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 to 3.13, or choose one: PYTHON=python3.12"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$python is $("$python" --version 2>&1); Python 3.11 to 3.13 is required, for example PYTHON=python3.12"
    if have_uv; then
        uv venv --quiet --python "$(command -v "$python")" .venv
    else
        "$python" -m venv .venv
    fi
fi
echo "$torch" >.venv/torch-build

if have_uv; then
    # Compile as pip does. Otherwise the first Ray on each node compiles everything, and its agents must start within 30 s.
    install=(uv pip install --quiet --compile-bytecode --python .venv/bin/python)
else
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip
    install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
fi

if [[ $torch == cuda ]] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
    echo "set-up: no GPU found here; make study TORCH=cpu would install a much smaller build of torch" >&2
fi
echo "set-up: installing $lock into .venv ($torch build of torch)" >&2
if [[ $torch == cuda ]]; then
    "${install[@]}" --require-hashes -r "$lock"
else
    rest=.venv/without-cuda-$(basename "$lock")
    without_cuda "$lock" >"$rest"
    # The lock is complete; without --no-deps, packages that need torch would ask for its hash.
    "${install[@]}" --no-deps --require-hashes -r "$rest"
    if have_uv; then
        uv=uv
    else
        "${install[@]}" "uv==$uv_version"
        uv=.venv/bin/uv
    fi
    # uv knows the index of PyTorch's CPU builds. Their dependencies are already installed.
    # shellcheck disable=SC2046  # the output must split into two words
    "$uv" pip install --quiet --compile-bytecode --python .venv/bin/python --torch-backend cpu --no-deps \
        $(grep -oE '^(torch|torchvision)==[^ ;\\]+' "$lock")
fi
