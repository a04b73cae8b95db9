"""Errors that are instructions: what is wrong, the evidence, the command that mends it, the way to go on regardless.

Every error this package raises on purpose is a `SpeedkitError`. Where a built-in type is what callers would expect
to catch (a wrong value), the class is that type as well.
"""

from __future__ import annotations


class SpeedkitError(Exception):
    """Base of every error raised by hf_speedkit.

    Args:
        what: what is wrong, one sentence with the numbers in it.
        evidence: lines that prove it, each shown indented.
        mend: the command or setting that mends it.
        regardless: how to go on all the same; None where going on would be wrong.

    Source: the form of design section 7; the parts stay readable as attributes so that tools can print them.
    """

    def __init__(
        self, what: str, *, evidence: tuple[str, ...] = (), mend: str | None = None, regardless: str | None = None
    ) -> None:
        self.what = what
        self.evidence = evidence
        self.mend = mend
        self.regardless = regardless
        lines = [what, *(f"  {line}" for line in evidence)]
        if mend is not None:
            lines.append(f"Mend it:  {mend}")
        if regardless is not None:
            lines.append(f"Go on all the same:  {regardless}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # The default rebuilds from `args`, which holds the joined text: parts would be lost between processes.
        return (_rebuild, (type(self), self.what, self.evidence, self.mend, self.regardless))


def _rebuild(
    kind: type[SpeedkitError], what: str, evidence: tuple[str, ...], mend: str | None, regardless: str | None
) -> SpeedkitError:
    return kind(what, evidence=evidence, mend=mend, regardless=regardless)


class ConfigurationError(SpeedkitError, ValueError):
    """A setting, or two settings together, that cannot work."""


class DatasetError(SpeedkitError, ValueError):
    """Data that cannot be trained on as it is."""


class PackingError(SpeedkitError, ValueError):
    """Documents that cannot be packed as asked."""


class HardwareError(SpeedkitError, RuntimeError):
    """The machine lacks what the job needs."""


class InstallationError(SpeedkitError, ImportError):
    """A package that is absent, too old, or installed and cannot be imported."""


class KernelAssertionError(SpeedkitError, RuntimeError):
    """A layer would run a slow, wrong or leaking implementation."""


class IsolationError(SpeedkitError, RuntimeError):
    """Documents in one packed row see one another."""


class CheckpointError(SpeedkitError, RuntimeError):
    """A checkpoint that cannot be written, or one that must not be trained on."""


class NonFiniteError(SpeedkitError, ArithmeticError):
    """A loss or gradient became NaN or infinite, and training was stopped."""


class TraceError(SpeedkitError, ValueError):
    """A trace file that cannot be read or does not hold what was asked for."""


class StepLogError(SpeedkitError, ValueError):
    """A step log that cannot be read or holds no steps."""


class BenchError(SpeedkitError, ValueError):
    """A bench that cannot run, or a result file that cannot be read."""
