"""Run mutants, all or some, and report those that survive.

    python -m tests.mutants                        # all, a few minutes
    python -m tests.mutants NAME...                # these
    python -m tests.mutants --sample 4 --seed X    # four that X chooses

Exit code 1 if a mutant survives, can no longer be planted, or the tests fail without a fault.
"""

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutants import MUTANTS
from tests.mutants.runner import Mutant, run, run_unchanged, stale

PROCESSES = 2


def judge(mutant: Mutant) -> str:
    """Run one mutant; returns "killed", or a sentence on why it was not."""
    result = run(mutant)
    if result.failed:
        print(f"killed    {mutant.name}  {result.seconds:.1f} s", flush=True)
        return "killed"
    fate = "SURVIVED" if result.code == 0 else f"no test ran (pytest's exit code {result.code})"
    print(f"{fate}  {mutant.name}: {mutant.why}\n{result.output[-2000:]}", flush=True)
    return f"{mutant.name}: {fate}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sample", type=int, default=0, help="run only so many (0: all)")
    parser.add_argument("--seed", default="", help="text that chooses the sample")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    if len(options.names) > len(chosen):
        parser.error(f"no such mutant among {', '.join(options.names)}")
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if reasons := [reason for m in chosen if (reason := stale(m))]:
        print(*reasons, sep="\n")
        return 1
    for result in run_unchanged(chosen):
        if result.code != 0:
            print(f"the tests fail without a fault:\n{result.output[-4000:]}")
            return 1
    with ThreadPoolExecutor(PROCESSES) as pool:
        survivors = [fate for fate in pool.map(judge, chosen) if fate != "killed"]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
