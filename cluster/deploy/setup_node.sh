#!/usr/bin/env bash
# Makes this machine one that can run Haversack: an environment in .venv of this checkout, with
# what pyproject.toml asks for in the versions of constraints.txt, and its commands on the PATH.
#
# It may be repeated. What is there already is left as it is, and where all is there no package
# index is asked. The packages come from pip's index; where the checkout has a folder `wheels`, they
# come from there and no index is asked at all (see docs/operations.md).
#
# PYTHON=python3.12 chooses the interpreter: its version has to be the same on all machines.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
if [[ -d wheels ]]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheels
fi

stamp=.venv/.node-is-set-up
wanted=$(sha256sum pyproject.toml constraints.txt)
if [[ ! -x .venv/bin/python ]]; then
    "${PYTHON:-python3}" -m venv .venv
fi
if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
    # setuptools comes first so that the package is built by the pinned one, not by a fetched one.
    install=(.venv/bin/python -m pip install --quiet --constraint constraints.txt)
    "${install[@]}" setuptools
    "${install[@]}" --no-build-isolation --editable .
    printf '%s\n' "$wanted" > "$stamp"
fi

# Ray's own commands over SSH, `ray down` among them, look for `ray` there.
line="export PATH=\"$PWD/.venv/bin:\$PATH\""
touch ~/.bashrc
grep --quiet --line-regexp --fixed-strings "$line" ~/.bashrc || printf '%s\n' "$line" >> ~/.bashrc
