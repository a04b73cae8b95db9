"""TraceCallback: trace chosen steps of a training run, and always say at the end what became of it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_speedkit.core.errors import TraceError
from hf_speedkit.measure.trace_recorder import StepRecorder
from hf_speedkit.trainer.metrics.trace_marks import marked_mask_building
from hf_speedkit.trainer.metrics.trace_sessions import checked_steps, named, remarks, sessions_of

logger = logging.getLogger(__name__)

SIZE_LIMIT_BYTES = 64 << 20
"""Compressed size above which a warning says how to record less: about 0.9 GB of JSON, 3 M events."""

_UNTRACED_STEPS_NEEDED = 3


class TraceCallback(TrainerCallback):  # type: ignore[misc]
    """Record chosen steps with torch.profiler and say at the end where the files are, or why there are none.

    Args:
        steps: global steps to trace; consecutive ones share a file. A step before which no warm-up step can run
            (the first of a run) is moved one further, with a note.
        output_dir: where files go; `output_dir/traces` of the TrainingArguments by default.
        all_ranks: record on every rank, each into its own file; rank 0 only by default.
        with_stack: record Python stacks: names modules and source lines, several times larger and slower.
        clock: seconds, monotonic; for tests.

    A trace is written when its last step ends; one cut short (end of training, exception, interrupt) is written as
    far as it goes and says so. Exceptions reach the callback where `attach` put it, through `closing`, or at
    interpreter exit.
    Files: `trace_rank{R}_step{N}.json.gz`; read them with `hf-speedkit trace FILE` or any Chrome trace viewer.

    Raises:
        ConfigurationError: a step that is not a positive integer, or none at all.
    """

    def __init__(
        self,
        steps: int | Iterable[int] = (20,),
        *,
        output_dir: str | Path | None = None,
        all_ranks: bool = False,
        with_stack: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wanted = checked_steps(steps)
        self._output_dir = Path(output_dir) if output_dir is not None else None
        self._all_ranks = all_ranks
        self._with_stack = with_stack
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._open = False
        self._pending: list[range] = []
        self._traced: set[int] = set()
        self._recorder: StepRecorder | None = None
        self._session = range(0)
        self._awaiting: str | None = None
        self._marks = contextlib.ExitStack()
        self._facts: dict[str, Any] = {}
        self._rank = 0
        self._folder = Path()
        self._step_times: list[float] = []
        self._step_began: float | None = None
        self.files: list[Path] = []
        self.messages: list[str] = []

    # What others ask.

    @property
    def is_recording(self) -> bool:
        """Whether a profiler is running: only one can, so launches must not be counted meanwhile."""
        return self._recorder is not None

    def excluded(self, step: int) -> str | None:
        """Why a step must stay out of all rates, the same on every rank; None if it may count.

        The warm-up step runs under the profiler as well, and writing the file falls into the step after the last.
        """
        return "traced" if step in self._traced else None

    def annotate(self, **facts: float | int) -> None:
        """Numbers to write into the file beside the events, e.g. `real_tokens` and `slots` of a traced step.

        Keys: those of `StepFacts`. They become part of the verdict: padding, tokens per second.
        """
        self._facts.update(facts)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Around `trainer.train()`: an exception or interrupt closes the recording, and passes on."""
        try:
            yield
        except BaseException as error:
            self.close(type(error).__name__)
            raise

    def close(self, reason: str) -> None:
        """End any recording, write what there is, and say what became of every requested step. Once per run."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        if self._recorder is not None:
            self._finish(reason)
        for session in self._pending:
            self._say(f"no trace of {named(session)}: training ended before it ({reason})")
        if self._rank != 0 and not self._all_ranks:
            return
        for path in self.files if self._rank == 0 else ():
            with self._reporting(f"{path.name} was written but could not be read"):
                for line in _read(path):
                    self._say(line)
        for message in self.messages:
            logger.warning("%s", message)  # warnings are what everyone sees: Python hides less by default

    # Trainer events.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Plan the recordings of this run."""
        self.close("a new run began")
        self._reset()
        self._open = True
        self._rank = int(args.process_index)
        self._folder = self._output_dir or Path(args.output_dir or ".") / "traces"
        self._facts = {"micro_batches": args.gradient_accumulation_steps, "layers": _layers(model)}
        sessions = self._plan(state.global_step)
        for session in sessions:
            self._traced.update(range(session[0] - 1, session[-1] + 2))
        if self._rank == 0 or self._all_ranks:
            self._pending = sessions
            for remark in remarks(sessions, state.max_steps) if self._rank == 0 else ():
                logger.warning("%s", remark)
        atexit.register(self._at_exit)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Start the profiler for a warm-up step."""
        if self._step_began is None:
            self._step_began = self._clock()
        if self._awaiting is not None:  # the event the recording waited for did not come
            self._facts["data_wait_missing"] = True
            self._begin_recording()
        if self._pending and state.global_step + 2 == self._pending[0][0]:
            self._start(self._pending.pop(0), model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the end of a warm-up or recorded step; write the file after the last."""
        self._count_time(state.global_step)
        if self._recorder is None:
            return
        if state.global_step == self._session[0] - 1:
            # Evaluation and saving follow this event and are no part of the next step.
            self._awaiting = (
                "save" if control.should_save else "evaluate" if control.should_evaluate else
                "log" if control.should_log else None
            )  # fmt: skip
            if self._awaiting is None:
                self._begin_recording()
            return
        with self._reporting("the profiler failed at the end of a step"):
            self._recorder.facts = self._facts_of(self._session)
            self._recorder.mark()
            if state.global_step == self._session[-1]:
                self._finish(None)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logging between two steps is over."""
        self._arrived("log")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation between two steps is over."""
        self._arrived("evaluate")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saving between two steps is over."""
        self._arrived("save")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close and report."""
        self.close(f"at step {state.global_step}")

    # One recording.

    def _plan(self, done: int) -> list[range]:
        steps = set()
        for step in self._wanted:
            if step <= done:
                self._say(f"no trace of step {step}: this run began after step {done}")
            elif step == done + 1:
                self._say(f"step {step} is traced as step {step + 1}: a warm-up step has to run before it")
                steps.add(step + 1)
            else:
                steps.add(step)
        return sessions_of(steps)

    def _start(self, session: range, model: Any) -> None:
        self._session = session
        recorder = StepRecorder(steps=len(session), with_stack=self._with_stack)
        try:
            recorder.start()
        except RuntimeError as error:
            self._say(f"no trace of {named(session)}: the profiler did not start ({_first_line(error)})")
            return
        self._recorder = recorder
        self._marks.enter_context(marked_mask_building(model))

    def _begin_recording(self) -> None:
        self._awaiting = None
        if self._recorder is not None:
            with self._reporting("the profiler failed after the warm-up step"):
                self._recorder.mark()

    def _arrived(self, event: str) -> None:
        if self._awaiting == event:
            self._begin_recording()

    def _finish(self, reason: str | None) -> None:
        """Stop the profiler and write the file. `reason`: why the recording is cut short."""
        recorder, session = self._recorder, self._session
        self._recorder = self._awaiting = None
        self._marks.close()
        if recorder is None:
            return
        recorder.facts = self._facts_of(session)
        if reason is not None:
            recorder.facts["partial"] = f"{recorder.recorded} of {len(session)} steps ({reason})"
            recorder.facts["complete_steps"] = recorder.recorded
        # A run that ends between two steps has not begun the next one, whatever the profiler ran for.
        ended = reason is not None and reason.startswith("at step") and not recorder.recorded
        had_begun = recorder.marks > 0
        with self._reporting(f"no trace of {named(session)}"):
            recorder.stop()
            if ended or not had_begun:
                when = "before it" if ended else "in its warm-up step"
                self._say(f"no trace of {named(session)}: training ended {when} ({reason})")
                return
            path = self._free_path(session)
            recorder.save(path)
            self.files.append(path)
            self._say(_written(path, session, recorder.facts.get("partial")))

    def _free_path(self, session: range) -> Path:
        """A name of its own for every rank, step and run: ranks must not overwrite one another (case V77)."""
        span = f"step{session[0]}" if len(session) == 1 else f"steps{session[0]}-{session[-1]}"
        path = self._folder / f"trace_rank{self._rank}_{span}.json.gz"
        number = 2
        while path.exists():
            path = self._folder / f"trace_rank{self._rank}_{span}_run{number}.json.gz"
            number += 1
        return path

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Tracing must not end a training run: its failures become messages."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, AttributeError, TraceError) as error:
            self._recorder = None
            self._marks.close()
            self._say(f"{what}: {_first_line(error)}")

    # Small things.

    def _count_time(self, step: int) -> None:
        now = self._clock()
        if self._step_began is not None and step not in self._traced:
            self._step_times.append(now - self._step_began)
        self._step_began = now

    def _facts_of(self, session: range) -> dict[str, Any]:
        return {**self._facts, "step": session[0], "untraced_step_time_s": self._untraced_step_time_s()}

    def _untraced_step_time_s(self) -> float | None:
        enough = len(self._step_times) >= _UNTRACED_STEPS_NEEDED
        return median(self._step_times) if enough else None

    def _say(self, message: str) -> None:
        self.messages.append(message)

    def _at_exit(self) -> None:
        self.close("the process ended")


def _layers(model: Any) -> int | None:
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    layers = getattr(text, "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def _written(path: Path, session: range, partial: str | None) -> str:
    size = path.stat().st_size
    message = (
        f"trace of {named(session)}{f', partial: {partial},' if partial else ''} in {path} ({size / 2**20:.1f} MiB)"
    )
    if size > SIZE_LIMIT_BYTES:
        message += f"; over {SIZE_LIMIT_BYTES >> 20} MiB: trace one step, without stacks, or cut it with trim_trace"
    return f"{message}; read it: hf-speedkit trace {path}"


def _read(path: Path) -> tuple[str, ...]:
    """Verdict and largest rows, at the end of training; a file over the size limit is left to the command line."""
    from hf_speedkit.core.trace_brief import brief
    from hf_speedkit.measure.trace import summarize_trace

    return brief(summarize_trace(path)) if path.stat().st_size <= SIZE_LIMIT_BYTES else ()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
