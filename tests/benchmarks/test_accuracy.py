"""The verdict on two loss curves; the script itself needs a GPU for curves that mean something."""

import math
from itertools import pairwise

import accuracy
import pytest
from geometry import learnable_dataset


def curve(seed, steps=40, lift=0.0):
    return [5 * math.exp(-step / 10) + 1.1 + 0.02 * math.sin(seed + 3 * step) + 0.01 * seed + lift * step / steps
            for step in range(steps)]  # fmt: skip


PLAIN = [curve(seed) for seed in range(3)]


def test_a_fast_path_inside_the_noise_passes():
    fast = [[loss + 1e-4 * (-1) ** step for step, loss in enumerate(one)] for one in PLAIN]
    verdict = accuracy.judge(PLAIN, fast, PLAIN[0])
    assert verdict["passed"]
    assert verdict["gap"] == pytest.approx(1e-4)
    assert verdict["repetition_gap"] == 0
    assert verdict["learned"] > 4


@pytest.mark.parametrize("seed", [0, 2])
def test_one_seed_that_learns_less_is_enough_to_fail(seed):
    fast = [curve(one, lift=0.2 if one == seed else 0.0) for one in range(3)]
    assert not accuracy.judge(PLAIN, fast, PLAIN[0])["passed"]


def test_an_end_that_is_off_fails_though_the_mean_is_small():
    steps = len(PLAIN[0])
    fast = [[loss + (0.03 if step >= 0.9 * steps else 0.0) for step, loss in enumerate(one)] for one in PLAIN]
    verdict = accuracy.judge(PLAIN, fast, PLAIN[0])
    assert verdict["gap"] < verdict["noise"]
    assert not verdict["passed"]


def test_the_documents_can_be_learned_and_are_the_same_language_for_every_seed():
    followers = {}
    for seed in (0, 1):
        for row in learnable_dataset(40, vocabulary=32, longest=512, seed=seed, mean_tokens=300)["input_ids"]:
            for token, following in pairwise(row):
                followers.setdefault(token, set()).add(following)
    assert max(map(len, followers.values())) <= 4


def test_the_plain_path_switches_off_settings_that_exist():
    from dataclasses import fields

    from hf_speedkit import SpeedSFTConfig

    assert set(accuracy.PLAIN) <= {one.name for one in fields(SpeedSFTConfig)}


def test_two_steps_go_through_both_paths():
    task = accuracy.Task(geometry="tiny", layers=4, slots=64, mean_tokens=20, steps=2, learning_rate=1e-3)
    common = {"steps": 2, "seed": 0, "device": "cpu"}
    plain = accuracy.loss_curve(task, settings=accuracy.PLAIN, **common)
    fast = accuracy.loss_curve(task, settings={}, **common)
    # One machine, fp32: the two heads sum in another order.
    assert plain == pytest.approx(fast, rel=1e-5)
    assert plain[0] > 0
