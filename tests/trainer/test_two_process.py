"""Two gloo processes against one: the same documents a step, the same losses, exact totals, one answer to a leak."""

import json
import time

import pytest
from rank_processes import start_ranks
from two_process_run import LENGTHS, build, padded_loss, rank_main

pytestmark = pytest.mark.two_process


def run_two(tmp_path, port, **options):
    began = time.monotonic()
    start_ranks(rank_main, port, str(tmp_path), options)
    assert time.monotonic() - began < 60
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    trainer = build(tmp_path_factory.mktemp("one"), accumulation=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    stream = trainer.eval_dataset.select(range(6)).to_iterable_dataset()
    return losses, trainer.evaluate()["eval_loss"], padded_loss(trainer, stream)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_ranks_train_as_one_process_with_accumulation_two(tmp_path, free_port, one_process, sharded):
    ranks = run_two(tmp_path, free_port, sharded=sharded, sent=sharded)
    assert "error" not in ranks[0], ranks[0]
    losses, eval_loss, stream_loss = one_process
    for said in ranks:
        # facts of the sharded and unsharded runs: losses within 1e-6 over 20 steps in fp32
        assert said["losses"] == pytest.approx(losses, abs=1e-5)
        assert said["isolation"] is True
        assert said["gradient_leak"] == 0.0
        assert said["operations"] == ["convolution", "recurrence", "attention"]
        assert said["sharded"] is sharded
        assert said["totals"]["speed/total_real_tokens"] == 2 * sum(LENGTHS)
        assert said["totals"]["speed/total_documents"] == 2 * len(LENGTHS)
        assert said["num_tokens"] == 2 * sum(LENGTHS)
        assert said["eval_loss"] == pytest.approx(eval_loss, abs=1e-5), "v27"
        assert said["padded eval_loss"] == pytest.approx(eval_loss, abs=1e-5), "v28: documents count once"
        assert said["stream's eval_loss"] == pytest.approx(stream_loss, abs=1e-5), "v36: of unequal widths"
        # v41: rank 1 had NaN there until rank 0's came, and a checkpoint holds them.
        assert said["buffers"] == ({"model.layers.0.bias": [[0.0, 1.0, 2.0], True]} if sharded else {})


def test_a_leak_on_one_rank_stops_both_with_its_message(tmp_path, free_port):
    ranks = run_two(tmp_path, free_port, sharded=True, leaky_rank=1)
    assert ranks[1]["error"] == "IsolationError"
    assert ranks[0]["error"] == "SpeedkitError"
    assert "rank 1 of 2 cannot train" in ranks[0]["message"]
    assert "see one another" in ranks[0]["message"]
