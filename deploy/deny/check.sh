#!/usr/bin/env bash
# Holds the dependency tree against deny.toml: bans, licences, sources. Installs cargo-deny (5 MB) into the target directory
# where the machine has none. Safe to run again.
#   bash deploy/deny/check.sh [CHECK...]
# `advisories` is left to who can reach the advisory database on GitHub: bash deploy/deny/check.sh advisories
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh
find_cargo

if ! command -v cargo-deny >/dev/null; then
    folder=$(target_directory)/cargo-deny
    pins=deploy/deny/requirements.txt
    if ! cmp -s "$pins" "$folder/pins"; then
        command -v python3 >/dev/null && python3 -c 'import venv, ensurepip' 2>/dev/null ||
            need_packages :python3-venv
        python3 -m venv --clear "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
            --requirement "$pins"
        cp "$pins" "$folder/pins"
    fi
    PATH=$folder/bin:$PATH
fi
[ $# -gt 0 ] || set -- bans licenses sources
cargo deny --locked check --hide-inclusion-graph "$@"
