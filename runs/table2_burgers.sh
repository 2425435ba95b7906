#!/usr/bin/env bash
# Table 2 of the paper: Burgers at three resolutions, three seeds each, then into the zoo.
# What is given is passed to `oformer train`: runs/table2_burgers.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in burgers-2048 burgers-512 burgers-8192; do
    for seed in 1 2 3; do
        oformer train "$name" --out "outputs/$name-seed$seed" --training.seed "$seed" "$@"
    done
    kept=--half
    if [ "$name" = burgers-2048 ]; then kept=--no-half; fi
    oformer zoo add "outputs/$name-seed1" --seed-run "outputs/$name-seed2" "outputs/$name-seed3" --finer "$kept"
done
oformer zoo table
