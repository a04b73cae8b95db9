"""A job whose rank 1 fails, or stands still in step 3; test_rank_watch.py starts it through torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # tests/trainer, tests


def fail(path):
    """Without a Trainer, which takes seconds to import: rank 0 waits in a collective."""
    import torch
    import torch.distributed as dist

    from hf_speedkit.trainer.ranks.watch import RankWatch

    dist.init_process_group("gloo")
    with RankWatch(600).running():
        if dist.get_rank() == 1:
            (path / "began").touch()
            raise RuntimeError("boom in the loader")
        dist.all_reduce(torch.zeros(1))


def dawdle(path):
    (path / "began").touch()
    time.sleep(3600)


def stand(path):
    from transformers import TrainerCallback
    from two_process_run import build

    class AtStepThree(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2 and args.process_index == 1:
                dawdle(path)

    trainer = build(path, accumulation=1, sharded=True, stuck_rank_timeout_s=15, isolation_check=False)
    trainer.add_callback(AtStepThree())
    trainer.train()


if __name__ == "__main__":
    {"fail": fail, "stand": stand}[sys.argv[1]](Path(sys.argv[2]))
