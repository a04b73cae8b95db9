"""Training on a packed stream: ranks in step without a plan, and checkpoints that know where the data stood."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.packing.stream import PackedStream, StreamState
from hf_speedkit.packing.stream_documents import COUNT_FIELDS
from hf_speedkit.trainer.data.resume import digest, refuse_other_documents
from hf_speedkit.trainer.ranks.agreement import agree
from hf_speedkit.trainer.step.loss import DeviceMetrics


class StreamedBatches(DeviceMetrics):
    """SFTTrainer that can train on a `PackedStream`; anything else is the parent's."""

    data_collator: Any
    _stream_state: StreamState | None = None
    _trainers_iterator: Iterator[Any] | None = None
    _rows: Iterator[Any] | None = None
    _first_documents: str | None = None

    @property
    def stream(self) -> PackedStream | None:
        """The training data, where it is a packed stream."""
        return self.train_dataset if isinstance(self.train_dataset, PackedStream) else None

    def get_train_dataloader(self) -> Any:
        """Trainer's loader; a stream is this rank's share already and must not be split once more."""
        loader = super().get_train_dataloader()
        shard = getattr(loader, "dataset", None)
        if self.stream is not None and isinstance(shard, IterableDatasetShard):
            # What transformers 5.23 does to accelerate's wrapper of a rank-aware batch sampler (trainer.py:1056).
            shard.num_processes, shard.process_index = 1, 0
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """One optimizer step's micro-batches; none once the stream has no documents left on any rank.

        A stream never ends by itself (its ranks would end at different steps), so the end of a pass is seen here: where
        a whole step holds no target on any rank. Their number over all ranks is known anyway, since the loss is divided
        by it. Only a rank whose own step is empty reads it, so no rank with work waits for its device.
        """
        if self.stream is None:
            batches, targets = super().get_batch_samples(epoch_iterator, num_batches, device)
            return batches, targets
        begins = epoch_iterator is not self._trainers_iterator
        if begins:
            self._trainers_iterator = self._rows = epoch_iterator
        batches, targets = self._streamed_batches(num_batches, device)
        if begins and not batches and self.stream.resumed:
            # The checkpoint's step was the last of its pass: without a step the Trainer would stop for good.
            self.stream.begin_next_pass()
            self._rows = iter(self.callback_handler.train_dataloader)
            batches, targets = self._streamed_batches(num_batches, device)
        if not batches:
            self.control.should_epoch_stop = True
        return batches, targets

    def _streamed_batches(self, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        if self._rows is None:
            return [], None
        batches, targets = super().get_batch_samples(self._rows, num_batches, device)
        states = [batch.pop("stream_state") for batch in batches]
        if not any(batch["token_counts"].target for batch in batches) and not (targets is not None and int(targets)):
            self._rows = None
            return [], None
        self._stream_state = states[-1]
        return batches, targets

    def release_rows(self) -> None:
        """Let go of the iterator that training drew from, so that its worker leaves.

        Where the garbage collector frees it together with the trainer, it closes the worker's queue first, and torch
        then waits 5 s for a worker that cannot hear it.
        """
        self._rows = self._trainers_iterator = None

    @staticmethod
    def first_streamed(stream: PackedStream, limit: int) -> list[dict[str, Any]]:
        """Give the first three documents cut to `limit` tokens, for the isolation probe.

        Raises:
            DatasetError: this rank's share of the stream holds no document to train on.
        """
        rows = [{key: value[:limit] for key, value in row.items()} for row in stream.first_documents(3)]
        if not rows:
            raise DatasetError(
                "there is no document with targets in this rank's share of the stream",
                mend="check the stream and its filters; each rank needs at least one document",
            )
        return rows

    def stream_report(self) -> DocumentReport | None:
        """What all ranks have read of the stream so far; every rank must call it."""
        state = self._stream_state
        if self.stream is None or state is None:
            return None
        own = torch.tensor([getattr(state.report, name) for name in COUNT_FIELDS], device=self.args.device)
        sums = self.accelerator.reduce(own, "sum").tolist()  # once, after training
        counts: dict[str, Any] = dict(zip(COUNT_FIELDS, sums, strict=True))
        return DocumentReport(tokens_per_batch=state.report.tokens_per_batch, overlong=state.report.overlong, **counts)

    def save_stream_state(self, checkpoint: Path) -> None:
        """Write where this rank's stream stands behind the last step."""
        if self._stream_state is None:
            return
        checkpoint.mkdir(parents=True, exist_ok=True)
        saved = {
            "world_size": self.args.world_size,
            "first_documents": self._first_documents,
            "state": self._stream_state.to_dict(),
        }
        (checkpoint / _state_name(self.args.process_index)).write_text(json.dumps(saved), encoding="utf-8")

    def resume_stream(self, checkpoint: str | None) -> None:
        """Put the stream where a checkpoint left it. The Trainer skips nothing then: `ignore_data_skip` is set.

        Raises:
            ConfigurationError: on all ranks, where the checkpoint does not say where each rank's stream stood.
        """
        stream = self.stream
        if stream is None:
            return
        from_the_start = self.__dict__.setdefault("_from_the_start", self.args.ignore_data_skip)
        # Trainer would read and collate every row of the run again, and count epochs by max_steps.
        self.args.ignore_data_skip = True
        if self._first_documents is None:  # once: a later pass of a shuffled stream begins with others
            self._first_documents = agree(lambda: digest(stream.first_documents(3)))
        state = None
        if checkpoint is not None and not from_the_start:
            path = Path(checkpoint)
            state = agree(lambda: self._read_stream_state(path))
        self._stream_state = state
        stream.load_state(state)

    def _read_stream_state(self, checkpoint: Path) -> StreamState:
        path = checkpoint / _state_name(self.args.process_index)
        if not path.is_file():
            raise ConfigurationError(
                f"{checkpoint} does not say where the stream of rank {self.args.process_index} stood",
                evidence=(f"there is no {path.name}; a packed stream resumes with as many ranks as saved it",),
                mend="resume a checkpoint of a streaming run with the same number of ranks",
                regardless="ignore_data_skip=True reads the stream from its beginning",
            )
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["world_size"] != self.args.world_size:
            raise ConfigurationError(
                f"the stream was split over {saved['world_size']} ranks, now there are {self.args.world_size}",
                mend=f"resume with {saved['world_size']} ranks",
                regardless="ignore_data_skip=True reads the stream from its beginning",
            )
        refuse_other_documents(saved.get("first_documents"), str(self._first_documents))
        state = StreamState.from_dict(saved["state"])
        own, before = self.stream, state.report
        assert own is not None, "called for a stream"
        if (own.tokens_per_batch, own.overlong) != (before.tokens_per_batch, before.overlong):
            raise ConfigurationError(
                "the stream would be packed in another way than in the run that saved it",
                evidence=(
                    f"tokens_per_batch: saved {before.tokens_per_batch}, now {own.tokens_per_batch}",
                    f"overlong: saved {before.overlong!r}, now {own.overlong!r}",
                ),
                mend="resume with the settings of the saved run",
                regardless="ignore_data_skip=True reads the stream from its beginning",
            )
        return state


def check_stream_settings(args: Any) -> None:
    """Refuse settings that a packed stream cannot be trained with.

    Raises:
        ConfigurationError: names the setting.
    """
    if args.max_steps <= 0:
        raise ConfigurationError(
            "a streaming dataset does not say how long it is, and max_steps is not set",
            mend="set max_steps; the stream is read again from its start where it has fewer documents",
        )
    if args.dataloader_num_workers > 1 or args.dataloader_persistent_workers:
        raise ConfigurationError(
            f"a packed stream is made by one worker that lives for one pass, not by {args.dataloader_num_workers}",
            evidence=("each worker would pack a part of its own, and a resumed run could not tell which came first",),
            mend="dataloader_num_workers=1, dataloader_persistent_workers=False",
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigurationError(
            "average_tokens_across_devices=False leaves a rank in the dark about the others' data",
            evidence=("the end of a stream is seen by the number of target tokens over all ranks",),
            mend="leave average_tokens_across_devices at its default, True",
        )


def _state_name(rank: int) -> str:
    return f"speedkit_stream_rank{rank}.json"
