#!/usr/bin/env bash
# What try.sh and test.sh share. Sourced, never run.
set -euo pipefail

# Commands or files the build needs, and the Debian package of each. UCX is built from source with a C
# and a C++ compiler; the client of etcd generates its messages with protoc and the descriptors that
# come with its library. Nothing else of the system is linked.
readonly NEEDED=(
    gcc:gcc g++:g++ make:make pkg-config:pkg-config
    protoc:protobuf-compiler
    /usr/include/google/protobuf/descriptor.proto:libprotobuf-dev
)

say() { printf '== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "cannot install packages: not root and no sudo; run as root: $*"
    fi
}

# Installs what is missing, and asks for nothing when nothing is.
install_packages() { need_packages "${NEEDED[@]}"; }

# is_there COMMAND|PATH: a path has a slash; nothing is never there.
is_there() {
    case $1 in
    "") return 1 ;;
    */*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

# need_packages COMMAND|PATH:PACKAGE...: installs the packages whose command or file is missing; without one, in any
# case.
need_packages() {
    local missing=() pair
    for pair in "$@"; do
        is_there "${pair%%:*}" || missing+=("${pair##*:}")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    command -v apt-get >/dev/null ||
        die "missing ${missing[*]}: install them with this system's package manager"
    say "installing ${missing[*]}"
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# rust-toolchain.toml names the compiler; rustup fetches it on first use.
find_cargo() {
    command -v cargo >/dev/null || PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    command -v cargo >/dev/null || die "cargo is missing: install rustup from https://rustup.rs"
    cargo --version >/dev/null || die "the toolchain of rust-toolchain.toml could not be installed"
}

# Where cargo puts what it builds.
target_directory() {
    cargo metadata --locked --no-deps --format-version 1 |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p'
}
