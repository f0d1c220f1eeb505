#!/usr/bin/env bash
# Makes a Python environment that has the official client of the OpenAI API, pinned. Safe to run again.
#   bash integration-tests/openai/install.sh DIR
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=deploy/lib.sh
source "$here/../../deploy/lib.sh"

folder=${1:?usage: install.sh DIR}
pins=$here/requirements.txt
if ! cmp -s "$pins" "$folder/pins"; then
    command -v python3 >/dev/null && python3 -c 'import venv, ensurepip' 2>/dev/null ||
        need_packages :python3-venv
    python3 -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$pins"
    cp "$pins" "$folder/pins"
fi
