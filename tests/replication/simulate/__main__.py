"""Run seeds: python -m tests.replication.simulate --seed 7 --runs 100 --steps 2000 --members 3."""

from __future__ import annotations

import argparse
import time

from .chaos import run_seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--runs", type=int, default=1, help="seeds to run (default 1)")
    parser.add_argument(
        "--steps", type=int, default=2_000, help="steps of each run (default 2,000)"
    )
    parser.add_argument("--members", type=int, default=3, help="replicas (default 3)")
    parser.add_argument("--replaces", action="store_true", help="an operator replaces replicas")
    parser.add_argument("--deletes", action="store_true", help="replicas delete old segments")
    parser.add_argument(
        "--grows",
        type=int,
        default=0,
        help="a shard of one replica gets so many (with --members 1)",
    )
    parser.add_argument("--fails-syncs", action="store_true", help="syncs of several replicas fail")
    options = parser.parse_args()

    began = time.perf_counter()
    seeds = range(options.seed, options.seed + options.runs)
    figures = run_seeds(
        seeds,
        members=options.members,
        steps=options.steps,
        replaces=options.replaces,
        deletes=options.deletes,
        grows=options.grows,
        fails_syncs=options.fails_syncs,
    )
    rate = figures["steps"] / (time.perf_counter() - began)
    print(f"{rate:.0f} steps/s", dict(figures))


if __name__ == "__main__":
    main()
