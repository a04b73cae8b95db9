"""Checkpoints that are whole or not there, and a run that goes on from the last of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_speedkit.core.checkpoint_records import CheckpointFile
from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.core.memory_words import bytes_in_words
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.checkpoints.export import (
    describe_model,
    export_dtype,
    is_adapter_model,
    model_bytes,
    needs_all_ranks,
)
from hf_speedkit.trainer.checkpoints.files import checked_files, files_of
from hf_speedkit.trainer.checkpoints.final_model import loadable_names, save_final_model
from hf_speedkit.trainer.checkpoints.folder import (
    UNFINISHED_NAME,
    checkpoint_bytes,
    clean_leftovers,
    manifest_of,
    named_failures,
    publish,
    require_space,
    rotate,
)
from hf_speedkit.trainer.checkpoints.other_model import refuse_other_model
from hf_speedkit.trainer.checkpoints.resume import (
    Reader,
    check_contents,
    loading_optimizer,
    settle_resume,
)
from hf_speedkit.trainer.checkpoints.resume_model import refuse_missing_weights, taking_saved_names
from hf_speedkit.trainer.checkpoints.run_lock import run_lock
from hf_speedkit.trainer.checkpoints.sharded_weights import is_sharded, load_sharded_optimizer, load_sharded_weights
from hf_speedkit.trainer.data.resume import PACKED, PADDED, STREAMED, refuse_foreign_rows
from hf_speedkit.trainer.data.streaming import StreamedBatches
from hf_speedkit.trainer.hardware import launched_here
from hf_speedkit.trainer.ranks.agreement import agree, gather_agreed
from hf_speedkit.trainer.ranks.meeting import wanted
from hf_speedkit.trainer.ranks.roll_call import RollCall
from hf_speedkit.trainer.ranks.stop_signal import StopSignal

logger = logging.getLogger(__name__)


class SafeCheckpoints(StreamedBatches):
    """SFTTrainer whose checkpoints are atomic, verified on resume, and written when the job is told to end."""

    throughput: Any = None
    startup: Any
    packing_active: bool
    _unfinished: Path | None = None
    _push_wanted = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stop_signal = StopSignal(self.args.stop_signals)
        self._final_save = RollCall("save_model()", timeout_s=self.args.ddp_timeout)
        attach(self, CheckpointCallback(self))

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended training before its last step; None where none did."""
        return self.stop_signal.stopped_by

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's training, from a checkpoint that was found whole; see `resume.settle_resume`.

        Raises:
            CheckpointError: the checkpoint is damaged, or the disk has no room for one.
        """
        saves = self.args.save_strategy != SaveStrategy.NO
        with ExitStack() as held:
            agree(partial(self._take_over, held, saves))
            checkpoint = settle_resume(resume_from_checkpoint, self.args.output_dir, self._reader())
            if checkpoint is not None:
                agree(partial(self._check_checkpoint, Path(checkpoint)))
            self.resume_stream(checkpoint)
            held.callback(self.release_rows)
            # Without checkpoints there is nothing to write when a signal comes: it ends the process as ever.
            with self.stop_signal.installed(saves):
                return super().train(checkpoint, *args, **kwargs)

    def _check_checkpoint(self, checkpoint: Path) -> None:
        check_contents(checkpoint, fsdp=self.is_fsdp_enabled)
        refuse_other_model(self.model, checkpoint)
        rows = STREAMED if self.stream is not None else PACKED if self.packing_active else PADDED
        size, ignore = self.args.train_batch_size, self.args.ignore_data_skip
        refuse_foreign_rows(checkpoint, rows=rows, batch_size=size, ignore=ignore)

    def _take_over(self, held: ExitStack, saves: bool) -> None:
        if self.args.should_save:
            run_dir = Path(self.args.output_dir)
            # Without checkpoints too: it would remove what another run there has in writing, and share its step log.
            if saves or self.args.step_log or run_dir.is_dir():
                held.enter_context(run_lock(run_dir))
            clean_leftovers(run_dir)

    def _reader(self) -> Reader:
        """Ranks that see the same disk share the reading."""
        args = self.args
        index, count = args.process_index, args.world_size
        if args.save_on_each_node:
            index, count = args.local_process_index, launched_here()
        return Reader(
            index=index,
            count=count,
            checksums=args.checkpoint_verification == "checksums",
            main=args.process_index == 0,
        )

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's, once all ranks are known to be about to do the same."""
        wants = wanted(self.args, self.state, self.control, logged=self._globalstep_last_logged)
        if wants:
            self.startup.meet(wants, step=self.state.global_step, timeout_s=self.args.ddp_timeout)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write below `_unfinished`; five small exchanges between the ranks, at a save only."""
        began = time.perf_counter()
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / UNFINISHED_NAME / f"checkpoint-{self.state.global_step}"
        agree(partial(self._begin_save, run_dir))
        with self._writing_to(folder.parent):
            agree(partial(self._write_checkpoint, model, trial, folder, run_dir))
        # Behind an exchange: the process that answers for what is nobody's own must find all of it.
        with named_failures(run_dir, folder.name):
            written = gather_agreed(partial(self._checked_files, folder))
            agree(partial(self._end_save, folder, run_dir, written))
        if self._push_wanted:
            self._push_wanted = False
            super()._push_from_checkpoint(str(run_dir / folder.name))
        if self.args.process_index == 0:
            size = sum(file.size_bytes for part in written for file in part.values())
            took = time.perf_counter() - began
            logger.info("%s: %s written and checked in %.1f s", folder.name, bytes_in_words(size), took)

    def _begin_save(self, run_dir: Path) -> None:
        if self.args.should_save:
            clean_leftovers(run_dir)
            self.require_checkpoint_space(run_dir)

    def require_checkpoint_space(self, run_dir: Path) -> None:
        """Refuse to begin a save that the disk has no room for; see `folder.require_space`."""
        require_space(run_dir, checkpoint_bytes(self.model, self.optimizer, adapters_only=is_adapter_model(self.model)))

    def _write_checkpoint(self, model: Any, trial: Any, folder: Path, run_dir: Path) -> None:
        with named_failures(run_dir, folder.name):
            super()._save_checkpoint(model, trial)
        self.save_stream_state(folder)
        if self.args.should_save and is_sharded(folder):
            describe_model(self.model, self.processing_class, folder)
        if self.state.best_global_step == self.state.global_step:
            # The name it will have. Trainer has looked for it where it is written, and under SHARDED_STATE_DICT a rank
            # that looks first finds nothing there: at the end only the others would load the best model, and wait.
            self.state.best_model_checkpoint = str(run_dir / folder.name)
            if self.args.should_save:
                self.state.save_to_json(str(folder / "trainer_state.json"))

    def _checked_files(self, folder: Path) -> dict[str, CheckpointFile]:
        return checked_files(folder, files_of(folder, rank=self.args.process_index, saver=self.args.should_save))

    def _end_save(self, folder: Path, run_dir: Path, written: list[dict[str, CheckpointFile]]) -> None:
        if not self.args.should_save:
            return
        if self.args.save_on_each_node:  # each node's disk holds the files of its own ranks
            written = [{name: file for name, file in part.items() if (folder / name).is_file()} for part in written]
        publish(folder, run_dir, manifest_of(self.state.global_step, self.args.world_size, written))
        rotate(
            run_dir,
            keep=self.args.save_total_limit,
            newest=run_dir / folder.name,
            best=self.state.best_model_checkpoint,
        )

    @contextmanager
    def _writing_to(self, directory: Path) -> Iterator[None]:
        self._unfinished = directory
        try:
            yield
        finally:
            self._unfinished = None

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes checkpoint-N: during a save, and only then, below `_unfinished`."""
        return str(self._unfinished) if self._unfinished is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Later: an upload reads the folder in the background, and it is about to get another name."""
        self._push_wanted = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model that `from_pretrained` loads; of a sharded one every rank must call it. See `save_final_model`.

        Raises:
            CheckpointError: the disk has no room for it, or another rank has ended without this call.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        if needs_all_ranks(self):
            self.startup.call(self._final_save)
        save_final_model(self, Path(output_dir or self.args.output_dir), plain=super().save_model)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, loadable_names(self.model, state_dict))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's end, which with save_total_limit=1 deletes all but the best checkpoint (5.23, trainer.py:2023).

        Of a run that was told to stop the last one stays: it is what the run goes on from.
        """
        self.startup.meet(["end training"], step=self.state.global_step, timeout_s=self.args.ddp_timeout)
        limit = self.args.save_total_limit
        if self.stopped_by is not None:
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Trainer's; of a run that is over, no step more is trained.

        transformers 5.23 (trainer.py:1658, 1963) compares the steps behind a step alone, so it would train one.
        """
        epochs, batches = super()._init_training_state(max_steps, *args, **kwargs)
        if not 0 < max_steps <= self.state.global_step:
            return epochs, batches
        if self.args.process_index == 0:
            step = self.state.global_step
            logger.warning("checkpoint-%d has %d of %d steps: nothing is left to train", step, step, max_steps)
        return self.state.num_train_epochs, 0

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Also a sharded checkpoint into a model that is not sharded."""
        if self.is_fsdp_enabled or not is_sharded(resume_from_checkpoint):
            with taking_saved_names(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_sharded_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Trainer's, also where a checkpoint has other names than the model."""
        with taking_saved_names(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also a sharded optimizer state into one that is not sharded."""
        with loading_optimizer(self.optimizer, checkpoint):
            if self.is_fsdp_enabled or checkpoint is None or not is_sharded(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                load_sharded_optimizer(self.model, self.optimizer, self.lr_scheduler, Path(checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Trainer's warnings; weights that the checkpoint does not hold are an error, for they stay as they began."""
        refuse_missing_weights(self.model, load_result)
        super()._issue_warnings_after_load(load_result)

    def get_train_dataloader(self) -> Any:
        """Trainer's loader, whose workers outlive a signal to end."""
        return self.stop_signal.spare_workers(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's loader, whose workers outlive a signal to end."""
        return self.stop_signal.spare_workers(super().get_eval_dataloader(eval_dataset))

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Trainer's count of target tokens over all ranks, with their stop flags riding on it."""
        with self.stop_signal.riding_on(self.accelerator):
            return super()._get_num_items_in_batch(batch_samples, device)


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Looks for room before the first step, and turns a signal into a last checkpoint and an end.

    Args:
        trainer: its trainer.
    """

    def __init__(self, trainer: SafeCheckpoints) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse a run whose first checkpoint has no room: better now than at its end."""
        agree(self._look_for_room)

    def _look_for_room(self) -> None:
        trainer, args = self._trainer, self._trainer.args
        run_dir = Path(args.output_dir)
        if not args.should_save:
            return
        if args.save_strategy != SaveStrategy.NO:
            trainer.require_checkpoint_space(run_dir)
            return
        try:  # nothing else would be left of the run; whether it is to be saved is not known here
            size = model_bytes(trainer.model, export_dtype(args, trainer.model))
            require_space(run_dir, size, what="the model at the end")
        except CheckpointError as error:
            logger.warning('save_strategy is "no", so nothing but a final model will be kept, if that: %s', error.what)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """From the first step on there is something to save."""
        self._trainer.stop_signal.listen()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save and stop where any rank was told to, at the same step on all of them."""
        signal, throughput = self._trainer.stop_signal, self._trainer.throughput
        if state.global_step >= state.max_steps:
            return
        with nullcontext() if throughput is None else throughput.waiting():
            stop = signal.agreed(meets_anyway=control.should_log)
        if stop:
            signal.note_stop()
            # Evaluation would take of the time until the process is killed.
            control.should_save, control.should_log, control.should_evaluate = True, True, False
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """No second save or evaluation behind the last one."""
        if self._trainer.stopped_by is not None:
            control.should_save = control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Say how the run ended."""
        if self._trainer.stopped_by is not None and args.process_index == 0:
            logger.warning(
                "%s: stopped after step %d of %d, checkpoint-%d is complete; go on with resume_from_checkpoint=True",
                self._trainer.stopped_by, state.global_step, state.max_steps, state.global_step,
            )  # fmt: skip
