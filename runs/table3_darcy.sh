#!/usr/bin/env bash
# Table 3 of the paper: Darcy flow at two resolutions, and better at one of them, one seed each, then into the zoo.
# What is given is passed to `oformer train`: runs/table3_darcy.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in darcy-141 darcy-211 darcy-141-plus; do
    oformer train "$name" --out "outputs/$name" "$@"
done
oformer zoo add outputs/darcy-141 --finer --half
oformer zoo add outputs/darcy-211 --finer --card-only
oformer zoo add outputs/darcy-141-plus --half
oformer zoo table
