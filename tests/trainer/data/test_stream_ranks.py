"""Two gloo processes on a stream whose halves are unequal, and an evaluation whose rows do not divide by two."""

import json
import time

import pytest
import torch
from rank_processes import start_ranks
from stream_run import EVAL, LONG, SHORT, STEP, make, rank_main
from support import tiny_hybrid, tokenized
from test_gradients import one_at_a_time, relative_error

pytestmark = pytest.mark.two_process


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    import socket

    path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    start_ranks(rank_main, port, str(path))
    assert time.monotonic() - began < 240  # no rank waits for another one for good
    return [json.loads((path / f"rank{rank}.json").read_text()) for rank in range(2)]


def tokens_of(rows):
    return [token for row in rows for token in row if token != 0]


def test_v34_v36_ranks_that_run_dry_at_different_steps_train_in_step(ranks):
    assert [said["steps"] for said in ranks] == [12, 12]
    assert len(ranks[0]["rows"]) == len(ranks[1]["rows"]) == 12
    assert all(len(row) == 32 for said in ranks for row in said["rows"])
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert min(ranks[0]["losses"]) > 0


def test_a_pass_ends_on_both_ranks_when_the_last_has_no_documents_left(ranks):
    long, short = (tokens_of(tokenized(part)["input_ids"][:]) for part in (LONG, SHORT))
    first, second = (said["rows"] for said in ranks)
    steps = -(-sum(LONG) // 32)  # 145 tokens: 5 rows
    assert sorted(tokens_of(first[:steps])) == sorted(long)
    assert sorted(tokens_of(second[:steps])) == sorted(short)
    assert all(set(row) == {0} for row in second[1:steps]), "rows that keep the rank in step"
    # The second pass begins at the same step on both.
    assert sorted(tokens_of(first[steps : 2 * steps])) == sorted(long)
    assert sorted(tokens_of(second[steps : 2 * steps])) == sorted(short)
    assert ranks[0]["read"] == ranks[1]["read"] >= len(LONG + SHORT)


def test_two_ranks_resume_a_stream_with_the_same_rows(ranks):
    for said in ranks:
        assert said["resumed"] == said["rows"][5:]


def test_a_rank_whose_share_has_no_targets_stops_both_before_training(ranks):
    assert all("no document with targets among the first 3" in said["one_sided"] for said in ranks)
    assert "rank 1 of 2 cannot train" in ranks[0]["one_sided"]


def test_v25_the_gradient_of_two_streaming_ranks_is_that_of_the_documents_alone(ranks):
    expected = one_at_a_time(tiny_hybrid(), tokenized(STEP))
    for said in ranks:
        assert relative_error(torch.tensor(said["gradient"]), expected) <= 1e-5


def test_v25_the_gradient_of_two_ranks_after_a_resume_is_that_of_the_uninterrupted_run(ranks):
    assert max(said["resumed_gradient_error"] for said in ranks) <= 1e-5


def test_v27_v35_evaluation_is_planned_for_both_ranks_and_counts_every_document_once(ranks, tmp_path):
    alone = make(tmp_path, tokenized(STEP), eval_dataset=tokenized(EVAL, seed=7), max_steps=1).evaluate()
    assert [said["eval_rows"] for said in ranks] == [ranks[0]["eval_rows"]] * 2
    assert sum(said["eval_real"] for said in ranks) == sum(EVAL)
    assert sum(said["eval_documents"] for said in ranks) == len(EVAL)
    for said in ranks:
        assert said["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-5)
