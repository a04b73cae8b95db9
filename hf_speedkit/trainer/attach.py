"""`attach`: put callbacks where their metrics reach every tracker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import wraps
from typing import Any, Protocol, runtime_checkable

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.trainer.installed_versions import warn_of_untested_versions
from hf_speedkit.trainer.launching import sharded_states
from hf_speedkit.trainer.metrics.returned_losses import ReturnedLosses
from hf_speedkit.trainer.step.watched_loss import watch_loss
from hf_speedkit.trainer.trackers import refuse_lone_readers

logger = logging.getLogger(__name__)

_OURS = "hf_speedkit."
"""Where the modules of callbacks of ours begin: a trainer that has one has been warned about versions."""

_CLOSES = "_speedkit_closes_recordings"
"""Set on a trainer whose `train` closes recordings."""

_LENGTHS = "seq_lengths"


@runtime_checkable
class LoopObserver(Protocol):
    """A callback that also wants to know when the callbacks after it are through."""

    attached: bool
    losses: ReturnedLosses

    def after_callbacks(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Every callback has handled `event`; the loop goes on."""


class LoopMarker(TrainerCallback):  # type: ignore[misc]
    """Stands last in the list and tells an observer when the loop goes on.

    Without it, the time trackers take to log would be counted as waiting for data.

    Args:
        observer: the callback to tell.
        listed: the trainer's callbacks, to which `add_callback` may bring one a second time.
    """

    def __init__(self, observer: LoopObserver, listed: list[TrainerCallback]) -> None:
        self.observer = observer
        self._listed = listed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See the class.

        Raises:
            ConfigurationError: see `refuse_second`.
        """
        refuse_second(self._listed)
        self.observer.after_callbacks("train_begin", args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See the class."""
        self.observer.after_callbacks("epoch_end", args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See the class."""
        self.observer.after_callbacks("step_end", args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """See the class; evaluation's own log is part of evaluation."""
        if logs is not None and "loss" in logs:
            self.observer.after_callbacks("log", args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See the class."""
        self.observer.after_callbacks("evaluate", args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See the class."""
        self.observer.after_callbacks("save", args, state, control)


def attach(trainer: Trainer, *callbacks: TrainerCallback) -> None:
    """Give callbacks to a trainer, ahead of those that report.

    `Trainer(callbacks=...)` and `add_callback` put a callback behind the trackers, so what it adds to a log reaches the
    console and nothing else. This puts it in front of them and of a tracker of your own, right behind the callback that
    decides when to log and save. A callback the trainer already has is moved. Several keep their order, also over
    several calls. Rows that are packed already keep their `seq_lengths` where the collator is a PackedCollator; an
    exception out of `train` closes the recording of a TraceCallback. Where the installed stack is outside the tested
    range, rank 0 logs a warning that names it, and where the trainer has trained already one that nothing of that was
    looked at. So it does where a loss weighs a step's targets otherwise than one large batch would.

    Args:
        trainer: a transformers Trainer or any subclass, before `train()`.
        callbacks: instances of TrainerCallback.

    Raises:
        ConfigurationError: no callback, something else than a trainer and callback instances, or a second callback of a
            kind that a trainer has once (a ThroughputCallback, a KernelAssertionCallback). A tracker that would read
            sharded weights on one rank alone.
    """
    if not callbacks:
        raise ConfigurationError(
            "attach() was given no callback, so nothing would be looked at",
            mend="attach(trainer, KernelAssertionCallback(), ThroughputCallback())",
        )
    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            own = isinstance(callback, type) and issubclass(callback, TrainerCallback)
            mend = (
                "attach(trainer, *callbacks)"
                if isinstance(callback, list | tuple)
                else "attach(trainer, ThroughputCallback())"
            )
            raise ConfigurationError(
                f"attach() takes a trainer and callback instances, not {name}",
                mend=f"attach(trainer, {name}(...))" if own else mend,
            )
    if not hasattr(trainer, "callback_handler"):
        raise ConfigurationError(
            f"attach() takes a transformers Trainer first, not a {type(trainer).__name__}",
            mend="attach(trainer, ThroughputCallback())",
        )
    if states := sharded_states(trainer.args):
        refuse_lone_readers(trainer.args.report_to, states)
    listed: list[TrainerCallback] = trainer.callback_handler.callbacks
    if trainer.is_world_process_zero() and not any(type(other).__module__.startswith(_OURS) for other in listed):
        warn_of_untested_versions()
    if trainer.is_world_process_zero() and trainer.state.global_step:
        logger.warning(
            "attach() comes behind train(): nothing of the %d steps so far was looked at; call it before train()",
            trainer.state.global_step,
        )
    given = dict.fromkeys(callbacks)  # each once
    refuse_second([*(other for other in listed if other not in given), *given])
    for callback in given:
        detach(trainer, callback)
        listed.insert(_front(listed), callback)
        callback.attached_in_front = True
        if isinstance(callback, LoopObserver):
            callback.attached = True
            callback.losses = ReturnedLosses(trainer)
            listed.append(LoopMarker(callback, listed))
    _link_tracing(listed)
    _close_recordings(trainer)
    _keep_lengths(trainer)
    watch_loss(trainer)


def _keep_lengths(trainer: Trainer) -> None:
    """Keep the column by which rows that are packed already say so to our collator, in any Trainer (case V12).

    With `remove_unused_columns`, on by default, the Trainer drops what the model's forward does not name, and each row
    would be one document. TRL's trainer names the column itself, in the list that is read here (transformers 5.23,
    trainer.py, `_set_signature_columns_if_needed`).

    Raises:
        ConfigurationError: that list is not where it was.
    """
    if not isinstance(trainer.data_collator, PackedCollator) or not trainer.args.remove_unused_columns:
        return
    try:
        trainer._set_signature_columns_if_needed()
        kept: list[str] = trainer._signature_columns
    except AttributeError as error:
        raise ConfigurationError(
            f"a column {_LENGTHS} of the data would not reach the collator",
            mend="remove_unused_columns=False",
        ) from error
    if _LENGTHS not in kept:
        kept.append(_LENGTHS)


def _close_recordings(trainer: Trainer) -> None:
    """Let what `trainer.train` raises close the recordings of this one trainer: no event of the Trainer's tells (V73).

    An exception that somebody catches, as notebooks do, would leave the profiler running until the process ends, and no
    other trace could begin.
    """
    from hf_speedkit.trainer.trace_callback import TraceCallback

    listed: list[TrainerCallback] = trainer.callback_handler.callbacks
    if _CLOSES in vars(trainer) or not any(isinstance(callback, TraceCallback) for callback in listed):
        return
    train = trainer.train

    @wraps(train)
    def closing(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            for callback in listed:
                if isinstance(callback, TraceCallback):
                    callback.close(type(error).__name__)
            raise

    trainer.train = closing
    setattr(trainer, _CLOSES, True)


def _link_tracing(listed: list[TrainerCallback]) -> None:
    """Let every pair of a tracing and a metrics callback know of each other (`TracedSteps`)."""
    from hf_speedkit.trainer.metrics.traced_steps import TracedSteps
    from hf_speedkit.trainer.throughput_callback import ThroughputCallback
    from hf_speedkit.trainer.trace_callback import TraceCallback

    listed[:] = [callback for callback in listed if not isinstance(callback, TracedSteps)]
    traces = [callback for callback in listed if isinstance(callback, TraceCallback)]
    for throughput in [callback for callback in listed if isinstance(callback, ThroughputCallback)]:
        place = listed.index(throughput)
        listed[place:place] = [TracedSteps(trace, throughput) for trace in traces]


def refuse_second(listed: Iterable[TrainerCallback]) -> None:
    """Refuse two callbacks of a kind that a trainer has once, which says so by a class attribute `only_one`.

    Args:
        listed: a trainer's callbacks.

    Raises:
        ConfigurationError: what two of them would do.
    """
    seen: set[type] = set()
    for callback in listed:
        kind = next((one for one in type(callback).__mro__ if "only_one" in vars(one)), None)
        if kind is None:
            continue
        if kind in seen:
            raise ConfigurationError(
                f"the trainer would have two {kind.__name__}s: {vars(kind)['only_one']}",
                mend="leave one out; attach() takes the same object again, and trainer.remove_callback("
                f"{kind.__name__}) makes room for another. SpeedSFTTrainer brings a ThroughputCallback of its own, as "
                "trainer.throughput, unless throughput=False",
            )
        seen.add(kind)


def detach(trainer: Trainer, callback: TrainerCallback) -> None:
    """Take a callback off a trainer, with what `attach` has put there for it; one that it has not got is no error."""
    listed: list[TrainerCallback] = trainer.callback_handler.callbacks
    listed[:] = [
        other
        for other in listed
        if other is not callback and not (isinstance(other, LoopMarker) and other.observer is callback)
    ]


def _front(listed: list[TrainerCallback]) -> int:
    """The place behind the Trainer's own flow and what was attached before."""
    place = 1 + max((at for at, callback in enumerate(listed) if isinstance(callback, DefaultFlowCallback)), default=-1)
    while place < len(listed) and getattr(listed[place], "attached_in_front", False):
        place += 1
    return place
