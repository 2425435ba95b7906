#!/usr/bin/env bash
# The airfoil of section 4.2 of the paper, one seed, then into the zoo.
# What is given is passed to `oformer train`: runs/section42_airfoil.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

oformer train airfoil --out outputs/airfoil "$@"
oformer zoo add outputs/airfoil --half
oformer zoo table
