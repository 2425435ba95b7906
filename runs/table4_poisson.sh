#!/usr/bin/env bash
# Table 4 of the paper: electro- and magnetostatics, with and without randomized meshes, three seeds each, then into the zoo.
# What is given is passed to `oformer train`: runs/table4_poisson.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in electro electro-aug magneto magneto-aug; do
    first=6 # the seeds of the released code: 6 and 7
    if [[ $name == magneto* ]]; then first=7; fi
    for seed in $first $((first + 1)) $((first + 2)); do
        oformer train "$name" --out "outputs/$name-seed$seed" --training.seed "$seed" "$@"
    done
    oformer zoo add "outputs/$name-seed$first" --half --fresh 1000 \
        --seed-run "outputs/$name-seed$((first + 1))" "outputs/$name-seed$((first + 2))"
done
oformer zoo table
