#!/usr/bin/env bash
# From a checkout to a picture: installs what is missing, builds, starts the stages, generates, stops.
#   bash deploy/try.sh "PROMPT" [options of omnictl generate]
# OMNI_MODEL names another checkpoint directory; by default the demo model is served, which draws flat shapes:
#   bash deploy/try.sh "a red circle left of a blue square on a white background"
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

# How long the stages may take to load, in seconds.
readonly START_TIMEOUT=300

if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    printf 'usage: bash deploy/try.sh "PROMPT" [options of omnictl generate]\n' >&2
    exit 2
fi
prompt=$1
shift

model=${OMNI_MODEL:-deploy/demo-model/checkpoint}
[ -f "$model/config.json" ] || die "no model: $model/config.json does not exist"

install_packages
find_cargo

# The dev profile: it builds in well under the time of a release build, and the crates that compute
# are optimised in it as well.
say "building (the first time takes some minutes)"
cargo build --locked --package omni --package omnictl
bin=$(target_directory)/debug

scratch=$(mktemp -d)
up=
# shellcheck disable=SC2329 # the trap below calls it
cleanup() {
    if [ -n "$up" ] && kill -0 "$up" 2>/dev/null; then
        kill -TERM "$up" 2>/dev/null || true
        wait "$up" 2>/dev/null || true
    fi
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

explain() {
    printf '%s; the last lines of the log:\n' "$1" >&2
    tail -n 20 "$scratch/log" >&2
    exit 1
}

say "starting router, kv-transfer, ar-stage and dit-worker"
"$bin/omni" up --model "$model" --listen 127.0.0.1:0 --ready-file "$scratch/ready" \
    --start-timeout-s "$START_TIMEOUT" </dev/null >"$scratch/log" 2>&1 &
up=$!
# `omni up` bounds the start itself; the extra seconds are for it to say so.
deadline=$((SECONDS + START_TIMEOUT + 30))
until [ -s "$scratch/ready" ]; do
    kill -0 "$up" 2>/dev/null || explain "the stages did not start"
    [ "$SECONDS" -lt "$deadline" ] || explain "the stages were not ready in time"
    sleep 0.1
done
endpoint=$(cat "$scratch/ready")

say "generating"
output=(--output out.png)
for option in "$@"; do
    case $option in
    -o* | --output | --output=*) output=() ;;
    esac
done
# Paths are the caller's, so the command runs where the caller stands.
status=0
(cd "$here" && "$bin/omnictl" generate --endpoint "$endpoint" "${output[@]}" "$@" -- "$prompt") ||
    status=$?
if [ "$status" -eq 1 ] || [ "$status" -eq 69 ]; then
    explain "the picture was not made (exit code $status)"
fi
exit "$status"
