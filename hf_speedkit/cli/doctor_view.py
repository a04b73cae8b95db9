"""What doctor found, as lines or as JSON. Renders; computes nothing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_speedkit.cli.doctor import Diagnosis
    from hf_speedkit.kernels.compatibility import Stack


def _runnable(command: str) -> str:
    """The command for this interpreter: another pip would install for another Python."""
    return f"{sys.executable} -m {command}" if command.startswith("pip ") else command


def text_lines(diagnosis: Diagnosis) -> list[str]:
    """The whole finding for a person, with commands for this interpreter."""
    from hf_speedkit.core.printable import printable
    from hf_speedkit.kernels.refusal import cost_of, table

    lines = [f"{diagnosis.model}  ({diagnosis.family or 'a family that transformers does not hold'})", ""]
    lines += [*_environment_lines(diagnosis.stack), ""]
    for check, line in zip(diagnosis.checks, table(diagnosis.checks), strict=True):
        lines.append(line)
        cost = cost_of(check)
        lines += [f"    costs: {cost}"] if cost else []
    if not diagnosis.checks:
        lines.append("no function of this model needs a kernel package")
    lines += [f"put in place: {line}" for line in diagnosis.changed]
    lines += _probe_lines(diagnosis)
    lines += ["", *diagnosis.remarks] if diagnosis.remarks else []
    if diagnosis.commands:
        lines += ["", "Run:", *(f"  {_runnable(command)}" for command in diagnosis.commands)]
    lines += ["", "good" if diagnosis.good else "something would be slow or wrong"]
    return [printable(line) for line in lines]


def _probe_lines(diagnosis: Diagnosis) -> list[str]:
    """Time and caches: a probe compiles what step 1 needs, so it is also what warms a node up."""
    if diagnosis.probe_s is None:
        return []
    first = sum(check.first_call_s or 0.0 for check in diagnosis.checks)
    lines = [f"the probe took {diagnosis.probe_s:.1f} s, {first:.1f} s of it in first calls of the functions above"]
    for cache in diagnosis.caches:
        state = f"cold: {cache.new_files} new files" if cache.new_files else "warm: nothing new"
        lines.append(f"{cache.compiler} keeps what it compiled in {cache.path} ({cache.variable}); {state}")
    return lines


def _environment_lines(stack: Stack) -> list[str]:
    from hf_speedkit.kernels.known import notes

    versions = ", ".join(f"{name} {version}" for name, version in sorted(stack.versions.items()))
    lines = [
        f"Python {stack.python}, torch's CUDA {stack.cuda or 'none'}, GPU {stack.architecture or 'none'}, "
        f"nvcc {'found' if stack.nvcc else 'not found'}",
        f"{versions}",
    ]
    for note in notes(stack):
        decision = note.decision
        lines.append(f"{note.subject}: {decision.verdict.value}: {decision.reason} ({decision.source})")
    return lines


def as_json(diagnosis: Diagnosis) -> str:
    """The same for a script, as one JSON object."""
    from hf_speedkit.core.records import to_dict
    from hf_speedkit.kernels.known import notes
    from hf_speedkit.measure.environment import collect_environment

    stack = diagnosis.stack
    document = {
        "model": diagnosis.model,
        "family": diagnosis.family,
        "good": diagnosis.good,
        "environment": to_dict(collect_environment()),
        "gpu": stack.architecture,
        "cuda": stack.cuda,
        "nvcc": stack.nvcc,
        "checks": [to_dict(check) for check in diagnosis.checks],
        "known": [{"subject": note.subject, **to_dict(note.decision)} for note in notes(stack)],
        "changed": list(diagnosis.changed),
        "commands": [_runnable(command) for command in diagnosis.commands],
        "remarks": list(diagnosis.remarks),
        "probe_s": diagnosis.probe_s,
        "caches": [
            {"compiler": c.compiler, "path": c.path, "variable": c.variable, "new_files": c.new_files}
            for c in diagnosis.caches
        ],
    }
    return json.dumps(document, allow_nan=False, sort_keys=True)
