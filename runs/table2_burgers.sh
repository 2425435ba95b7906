#!/usr/bin/env bash
# Table 2 of the paper: Burgers at three resolutions, and better at two of them, three seeds each, then into the zoo.
# What is given is passed to `oformer train`: runs/table2_burgers.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in burgers-2048 burgers-512 burgers-8192 burgers-2048-plus burgers-512-plus; do
    for seed in 1 2 3; do
        oformer train "$name" --out "outputs/$name-seed$seed" --training.seed "$seed" "$@"
    done
    how=(--half)
    if [ "$name" = burgers-2048 ]; then how=(--no-half); fi
    if [ "$name" = burgers-8192 ]; then how=(--card-only); fi
    if [[ $name == *-plus ]]; then how=(--half --average 16); fi
    oformer zoo add "outputs/$name-seed1" --seed-run "outputs/$name-seed2" "outputs/$name-seed3" \
        --finer --fresh 1000 "${how[@]}"
done
oformer zoo table
