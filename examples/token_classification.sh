#!/usr/bin/env bash
# From text to classes with the commands alone, in a temporary folder; `colibri` must be on the PATH.
#
# usage: token_classification.sh [BUNDLE]
set -euo pipefail

command -v colibri >/dev/null || { echo "Expected the command colibri, got none - at the PATH" >&2; exit 2; }
bundle=$(realpath "${1:-"$(dirname "${BASH_SOURCE[0]}")/../models"}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

echo "== is the bundle whole?"
colibri validate-config --files "$bundle/config.json"

echo "== text to token ids"
echo "Colibri sends every word to two of eight experts." | colibri tokenize --output input.bin
colibri tokenize --decode input.bin

echo "== the trained gate as a constant table; --check is for build scripts"
colibri gen-router "$bundle/router_weights.bin" --hidden-size 128 --output router.c
colibri gen-router "$bundle/router_weights.bin" --hidden-size 128 --output router.c --check

echo "== token ids to experts and classes"
cp -r "$bundle/experts" experts
colibri infer --input input.bin --experts-dir experts/
colibri infer --input input.bin --experts-dir experts/ --format json --output answer.json
grep '"prediction"' answer.json

echo "== the same bits, wherever the weights are and however many threads run"
colibri -q infer --input input.bin --experts-dir experts/ --loading mmap --output mapped.npy
colibri -q infer --input input.bin --experts-dir experts/ --loading on-demand --threads 1 --output loaded.npy
cmp mapped.npy loaded.npy && echo "equal"
