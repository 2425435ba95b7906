"""Samples per second of electrostatics, with and without randomized meshes.

python benchmarks/poisson.py [--count 10000] [--processes 2]

Each process makes every n-th run of 64 samples, as shards of `oformer generate` do, and nothing is written. Processes
are better than threads here: the matrices are small. Set OMP_NUM_THREADS=1.
"""

import argparse
import multiprocessing
import time

import torch

from oformer.problems.electrostatics import Electrostatics

PART = 64  # samples at once, as in a part of a dataset


def share_of(work: tuple[bool, int, int, int]) -> int:
    """The mesh points in the samples of one process."""
    randomized, count, first, stride = work
    torch.set_num_threads(1)
    problem = Electrostatics(train=count * 4 // 5, randomized=randomized)
    points = 0
    for start in range(first * PART, count, stride * PART):
        samples = problem.samples(range(start, min(start + PART, count)), seed=0)
        points += sum(sample.input.points for sample in samples)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of the generator of electrostatics.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.count} samples, {options.processes} process(es), torch {torch.__version__}; four fifths on the "
          "training shapes, the others on the U\n")  # fmt: skip
    print("meshes      seconds   samples/s   ms a sample and process   points a sample")
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(share_of, [(False, 1, 0, 1)] * options.processes)  # imports, which do not count
        for randomized in (False, True):
            start = time.perf_counter()
            shares = [(randomized, options.count, k, options.processes) for k in range(options.processes)]
            points = sum(pool.map(share_of, shares, chunksize=1))
            seconds = time.perf_counter() - start
            each = 1e3 * seconds * options.processes / options.count
            name = "randomized" if randomized else "default"
            print(f"{name:10}  {seconds:7.1f}   {options.count / seconds:9.0f}   {each:23.2f}"
                  f"   {points / options.count:15.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
