#!/usr/bin/env bash
# Checks and tests everything, on a fresh Debian or Ubuntu machine that has rustup. Safe to run again.
#   bash deploy/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

summary=()

report() {
    printf '\n'
    say "summary"
    local line
    for line in "${summary[@]}"; do
        printf '   %s\n' "$line"
    done
}
trap report EXIT

# step NAME COMMAND...: runs it and notes how it went; the first failure ends the script.
step() {
    local name=$1 start=$SECONDS
    shift
    printf '\n'
    say "$name"
    if "$@"; then
        summary+=("ok      $((SECONDS - start)) s  $name")
    else
        summary+=("FAILED  $((SECONDS - start)) s  $name: $*")
        return 1
    fi
}

skip() { summary+=("skipped: $1"); }

install_packages
# The registry's tests run on a real etcd, on ports of their own.
need_packages etcd:etcd-server
find_cargo

step "format" cargo fmt --all --check
step "lints" cargo clippy --locked --workspace --all-targets -- -D warnings
step "binaries" cargo build --locked --workspace --bins
# The tests run these binaries instead of asking cargo for them.
OMNI_BIN_DIR="$(target_directory)/debug"
OMNI_BIN="$OMNI_BIN_DIR/omni"
export OMNI_BIN_DIR OMNI_BIN
# They drive the HTTP API with the official client of the OpenAI API as well.
openai_client="$(target_directory)/openai-client"
step "openai client" bash integration-tests/openai/install.sh "$openai_client"
export OMNI_OPENAI_PYTHON="$openai_client/bin/python"
# The status page is looked at with a real browser, where the system has one that is no snap.
browser=chromium-headless-shell
if ! command -v "$browser" >/dev/null && command -v apt-cache >/dev/null && apt-cache show "$browser" >/dev/null 2>&1; then
    need_packages "$browser:$browser"
fi
if command -v "$browser" >/dev/null; then
    export OMNI_REQUIRE_BROWSER=1
else
    skip "status page in a browser (no package $browser on this system)"
fi
step "tests" cargo test --locked --workspace --no-fail-fast
step "GPU path" bash deploy/cuda/check.sh
step "chart" bash deploy/chart-test/run.sh

# The package that is installed where there is no cargo-deny is built for x86-64.
if command -v cargo-deny >/dev/null || [ "$(uname -m)" = x86_64 ]; then
    step "dependencies" bash deploy/deny/check.sh
else
    skip "dependencies (cargo install --locked cargo-deny, then bash deploy/deny/check.sh)"
fi
skip "advisories (where GitHub can be reached: bash deploy/deny/check.sh advisories)"
skip "GPU tests (on a machine with an H100 or H200: bash deploy/cuda/test.sh)"
