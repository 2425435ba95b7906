#!/usr/bin/env bash
# Table 1 of the paper: Navier-Stokes, one seed each, then into the zoo.
# What is given is passed to `oformer train`: runs/table1_navier_stokes.sh --training.precision tf32
# Stop it at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

for name in ns3 ns2-part ns2-part-plus ns1 ns2-full ns-mix; do
    oformer train "$name" --out "outputs/$name" "$@"
    case $name in
        ns1 | ns3 | ns-mix) oformer zoo add "outputs/$name" --finer --card-only ;;
        *-plus) oformer zoo add "outputs/$name" --finer --half --average 16 ;;
        *) oformer zoo add "outputs/$name" --finer --half ;;
    esac
done
oformer zoo table
