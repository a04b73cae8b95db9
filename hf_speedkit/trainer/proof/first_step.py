"""The end of the kernel proof: the kernels of the first training step, held against what was found before it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelCheck
from hf_speedkit.kernels.ran import (
    EXPECTED_NAMES,
    KernelRun,
    StepKernels,
    functions_that_ran,
    never_ran,
    stepped_aside,
    with_runs,
)
from hf_speedkit.measure.profilers import another_profiler_runs
from hf_speedkit.trainer.ranks.agreement import agree, say_once

logger = logging.getLogger(__name__)

_NO_KERNELS = "CUPTI gave no kernels (no right to use it, or another tool such as DCGM or Nsight holds it)"


class FirstStep(TrainerCallback):  # type: ignore[misc]
    """Base of the callbacks that prove kernels: reads what ran from a trace of the first micro-batch.

    The first step enters no rate (`ThroughputCallback` leaves it out as warm-up), so it may be slow: one CUPTI session,
    one wait for the device and an agreement over ranks, all before the first update of the weights.
    The session begins in a forward pre-hook, behind every callback's `on_step_begin`, so that a TraceCallback or
    another profiler goes first and this one stays away.

    `checks` holds one KernelCheck per function, `runs` which of them were seen; `runs` is None before the first step
    and where nothing could be read.
    """

    def __init__(self) -> None:
        self.step_kernels = StepKernels()
        self.expected_names: Mapping[tuple[str, str], tuple[str, str]] = EXPECTED_NAMES
        self.checks: tuple[KernelCheck, ...] = ()
        self.runs: tuple[KernelRun, ...] | None = None
        self._mode = "off"
        self._hook: Any = None
        self._frozen: frozenset[str] = frozenset()
        self._names: frozenset[str] | None = None
        self._unread = ""

    def expect(self, mode: str) -> None:
        """Demand in the coming step what `checks` promise: "strict" refuses, "warn" says so, others look at nothing."""
        self._forget()
        self.step_kernels.cancel()
        self._mode = mode if mode in ("strict", "warn") else "off"
        self._names, self.runs = None, None
        self._unread = "the model's own forward was not called"

    def demands(self, function: str) -> bool:
        """Whether a function that was found fused must be seen to run."""
        return True

    def own_way_on(self, error: KernelAssertionError) -> KernelAssertionError:
        """The refusal in the words of whoever raises it."""
        return error

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Before the first step: wait for the first forward."""
        if self._mode != "off" and args.device.type != self.step_kernels.device:
            self._mode = "off"  # a CPU has no fused kernels to look for
        if self._mode == "off" or self._hook is not None or self._names is not None:
            return
        promised = functions_that_ran((), self.checks, expected=self.expected_names)
        if all(run.forward is None for run in promised):
            self._unread = ""  # nothing whose kernels' names are known: nothing to look for, and nothing to say
            return
        self._frozen = frozen_layers(model, {check.layer for check in self.checks})
        begin: Any = self._begin
        if getattr(args, "torch_compile", False):  # it changes Python state, which a compiled graph must not capture
            begin = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
        self._hook = model.register_forward_pre_hook(begin)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One micro-batch is enough."""
        self._end()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Go on, or stop all ranks before the weights are touched."""
        if self._mode == "off":
            return
        self._end()
        self._forget()
        mode, self._mode = self._mode, "off"
        step = state.global_step + 1
        error = self._missing(step)
        if mode == "strict":
            agree(lambda: _raise(error))
        said = [*([str(error)] if error is not None else []), *stepped_aside(self.runs or ())]
        if self.runs is None and self._unread:
            said.append(f"kernels of step {step} UNVERIFIED, training goes on: {self._unread}")
        say_once(logger.warning, said)
        self.checks = with_runs(self.checks, self.runs or (), step)

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._forget()
        if another_profiler_runs():
            self._unread = "another profiler runs in that step, and only one can"
            return
        with self._reporting():
            if not self.step_kernels.begin():
                self._unread = "the profiler did not start"

    def _end(self) -> None:
        names: frozenset[str] | None = None
        with self._reporting():
            names = self.step_kernels.end()
        if names is not None:
            self._names, self._unread = names, "" if names else _NO_KERNELS

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A profiler that fails is no reason to stop, least of all on one rank of many."""
        try:
            yield
        except RuntimeError as error:
            self._unread = f"the profiler failed: {(str(error).strip().splitlines() or ['without a word'])[0]}"

    def _missing(self, step: int) -> KernelAssertionError | None:
        if not self._names:
            return None
        runs = functions_that_ran(self._names, self.checks, expected=self.expected_names)
        self.runs = tuple(
            replace(run, backward=None) if run.layer in self._frozen and not run.backward else run for run in runs
        )
        seen = sum(bool(run.forward and run.backward) for run in self.runs)
        logger.info("step %d ran the kernels of %d of %d fused functions", step, seen, len(self.runs))
        error = never_ran([run for run in self.runs if self.demands(run.function)])
        return None if error is None else self.own_way_on(error)

    def _forget(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def frozen_layers(model: torch.nn.Module, kinds: Iterable[str]) -> frozenset[str]:
    """Classes of layers that no gradient has to pass: nothing in them, or before them, is trained.

    Args:
        model: its modules come in the order they run in, as those of decoders do.
        kinds: names of classes.
    """
    reached: set[str] = set()
    trained = False
    for module in model.modules():
        trained = trained or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        inside = trained or any(parameter.requires_grad for parameter in module.parameters())
        if inside:
            reached.update(kind.__name__ for kind in type(module).__mro__)
    return frozenset(kinds) - reached


def _raise(error: KernelAssertionError | None) -> None:
    if error is not None:
        raise error
