"""A gate for CI: two step logs are compared, and the job fails where the later one is worse.

    python examples/regression_gate.py runs/base/speedkit_steps.jsonl runs/new/speedkit_steps.jsonl

Step logs are what SpeedSFTConfig(step_log=True) writes. Rates of one machine differ from run to run: a tenth is left to
them. How full rows are does not, so it has no slack. Traces have a gate of their own: hf-speedkit trace --fail-if.
"""

import sys
from pathlib import Path

from hf_speedkit.core.run_report import run_report
from hf_speedkit.core.step_log import parse_step_log

SLACK = 0.10  # of tokens per second


def read(path):
    """A run by its step log."""
    with Path(path).open(encoding="utf-8") as lines:
        return run_report(parse_step_log(lines, name=str(path)), name=str(path))


def worse(base, new, slack=SLACK):
    """What is worse in the new run, in words."""
    found = []
    key = "speed/real_tokens_per_second"
    if new.rates[key] < (1 - slack) * base.rates[key]:
        found.append(f"real tokens/s fell from {base.rates[key]:,.0f} to {new.rates[key]:,.0f}")
    if new.packing_efficiency < base.packing_efficiency:
        found.append(f"rows are {new.packing_efficiency:.1%} full; they were {base.packing_efficiency:.1%}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: regression_gate.py BASE.jsonl NEW.jsonl, each a run's speedkit_steps.jsonl", file=sys.stderr)
        sys.exit(2)
    problems = worse(read(sys.argv[1]), read(sys.argv[2]))
    print("\n".join(problems) or "as fast as before")
    sys.exit(1 if problems else 0)
