#!/usr/bin/env bash
# Makes a Python environment that has the official client of the OpenAI API, pinned. Safe to run again.
#   bash integration-tests/openai/install.sh DIR
set -euo pipefail
folder=$1
pins=$(dirname "${BASH_SOURCE[0]}")/requirements.txt

if [ ! -f "$folder/pins" ] || ! cmp -s "$pins" "$folder/pins"; then
    python3 -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$pins"
    cp "$pins" "$folder/pins"
fi
