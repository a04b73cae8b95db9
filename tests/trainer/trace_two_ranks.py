"""One rank of a two-process run that is traced; started by test_trace_callback.py."""

from __future__ import annotations

import os
from pathlib import Path


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    from plain_trainer import make_trainer

    from hf_speedkit.trainer.trace_callback import TraceCallback

    callback = TraceCallback(3, output_dir=Path(folder), all_ranks=True)
    make_trainer(Path(folder) / "run", callbacks=[callback], ddp_backend="gloo").train()
    trace_a_sharded_model(Path(folder) / f"fsdp_rank{rank}.json.gz")
    torch.distributed.destroy_process_group()


def trace_a_sharded_model(path: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hf_speedkit.measure.trace_recorder import StepRecorder

    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    recorder = StepRecorder(steps=1)
    recorder.start()
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        recorder.mark()
    recorder.stop()
    recorder.save(path)
