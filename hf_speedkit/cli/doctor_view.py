"""What doctor found, as lines or as JSON. Renders; computes nothing."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_speedkit.cli.doctor import Diagnosis
    from hf_speedkit.core.errors import InstallationError
    from hf_speedkit.kernels.compatibility import Stack


def _runnable(command: str) -> str:
    """The command for this interpreter: another pip would install for another Python. uv's environments have no pip."""
    if not command.startswith("pip "):
        return command
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        verb, _, rest = command.removeprefix("pip ").partition(" ")
        return f"uv pip {verb} --python {sys.executable} {rest}"
    return f"{sys.executable} -m {command}"


def text_lines(diagnosis: Diagnosis) -> list[str]:
    """The whole finding for a person, with commands for this interpreter."""
    from hf_speedkit.core.printable import printable
    from hf_speedkit.kernels.refusal import cost_of, table

    lines = [f"{diagnosis.model}  ({diagnosis.family or 'a family that transformers does not hold'})", ""]
    lines += [*_environment_lines(diagnosis.stack), ""]
    lines += table(diagnosis.checks)
    costs = dict.fromkeys((check.verdict.value, cost) for check in diagnosis.checks if (cost := cost_of(check)))
    lines += [f"{verdict} costs: {cost}" for verdict, cost in costs]
    lines += [f"put in place: {line}" for line in diagnosis.changed]
    lines += _probe_lines(diagnosis)
    for remark in diagnosis.remarks:
        lines += ["", remark]
    for title, commands in (("Run:", diagnosis.commands), ("In the job's settings:", diagnosis.settings)):
        lines += ["", title, *(f"  {_runnable(command)}" for command in commands)] if commands else []
    return [printable(line) for line in (*lines, "", _last_line(diagnosis))]


def broken_text(broken: InstallationError, *, as_json: bool) -> str:
    """What there is to say where a package that everything needs does not import, or is too old."""
    remark = "\n".join((f"Nothing can train here: {broken.what}", *(f"  {line}" for line in broken.evidence)))
    command = _runnable(broken.mend or "")
    if as_json:
        return json.dumps({"good": False, "remarks": [remark], "commands": [command]}, sort_keys=True)
    return f"{remark}\n\nRun:\n  {command}\n\nsomething would be slow or wrong: what is installed cannot train"


def _last_line(diagnosis: Diagnosis) -> str:
    if diagnosis.good:
        return "good"
    bad = sum(check.verdict.value != "FUSED" for check in diagnosis.checks)
    what = f"{bad} of {len(diagnosis.checks)} lines above are not FUSED" if bad else "torch cannot use the GPU"
    return f"something would be slow or wrong: {what}"


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
        "settings": list(diagnosis.settings),
        "remarks": list(diagnosis.remarks),
        "probe_s": diagnosis.probe_s,
        "caches": [
            {"compiler": c.compiler, "path": c.path, "variable": c.variable, "new_files": c.new_files}
            for c in diagnosis.caches
        ],
    }
    return json.dumps(document, allow_nan=False, sort_keys=True)
