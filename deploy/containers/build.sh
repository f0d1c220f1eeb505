#!/usr/bin/env bash
# Builds the image omni:VERSION from the committed tree, with docker, podman or buildah; ENGINE names another program.
#   bash deploy/containers/build.sh [cuda]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

case ${1:-cpu} in
cpu) file=Containerfile suffix= ;;
cuda) file=Containerfile.cuda suffix=-cuda ;;
*) die "there is a cpu and a cuda image, no ${1}" ;;
esac
engine=${ENGINE:-$(command -v docker || command -v podman || command -v buildah)} ||
    die "none of docker, podman and buildah is installed"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD | tar x -C "$context"
revision=$(git rev-parse HEAD)
"$engine" build --file "$context/deploy/containers/$file" --build-arg "GIT_SHA=${revision:0:12}" \
    --label "org.opencontainers.image.version=$version" --label "org.opencontainers.image.revision=$revision" \
    --tag "omni:$version$suffix" "$context"
say "omni:$version$suffix"
