#!/usr/bin/env bash
# Finds the CUDA compiler that the feature `cuda` needs, or installs NVIDIA's own packages of it (280 MB, under
# NVIDIA's licence, no driver and no GPU needed) into a folder. Prints the folder to use as CUDA_HOME. Safe to run
# again.
#   export CUDA_HOME=$(bash deploy/cuda/toolkit.sh [DIR])
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

# The kernels are compiled for sm_90a by this release.
readonly RELEASE=13.0

is_it() { [ -x "$1/bin/nvcc" ] && "$1/bin/nvcc" --version | grep -q "release $RELEASE"; }

for home in "${CUDA_HOME:-}" /usr/local/cuda "/usr/local/cuda-$RELEASE"; do
    if [ -n "$home" ] && is_it "$home"; then
        echo "$home"
        exit
    fi
done

folder=${1:-$(target_directory)/cuda-toolkit}
pins=deploy/cuda/requirements.txt
if ! cmp -s "$pins" "$folder/pins"; then
    {
        command -v python3 >/dev/null && python3 -c 'import venv, ensurepip' 2>/dev/null ||
            need_packages :python3-venv
        python3 -m venv --clear "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$pins"
    } >&2
    cp "$pins" "$folder/pins"
fi
home=$("$folder/bin/python" -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13"))')
is_it "$home" || die "no nvcc of release $RELEASE in $home"
echo "$home"
