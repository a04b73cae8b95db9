"""The step clock with a clock and a device that tests move by hand."""

import pytest

from hf_speedkit.measure.step_clock import StepClock


class HandClock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def pass_(self, seconds):
        self.seconds += seconds


class FakeDevice:
    """A device that runs what was issued one after the other, behind the host's back."""

    def __init__(self, clock):
        self.clock = clock
        self.busy_until = 0.0
        self.waits = 0

    def issue(self, seconds):
        self.busy_until = max(self.busy_until, self.clock()) + seconds

    def mark(self):
        return max(self.busy_until, self.clock())

    def wait(self, mark):
        self.waits += 1
        self.clock.seconds = max(self.clock.seconds, mark)

    def elapsed_s(self, start, end):
        return end - start if end <= self.clock() else None


@pytest.fixture
def hand():
    return HandClock()


def step(clock, hand, *, data=0.0, host=0.0, callbacks=0.0):
    hand.pass_(data)
    clock.begin_step()
    hand.pass_(host)
    clock.end_step()
    hand.pass_(callbacks)
    clock.loop_goes_on()


def test_parts_of_a_step_add_up_to_the_wall_time(hand):
    clock = StepClock(now=hand)
    clock.start()
    began = hand()
    for _ in range(3):
        step(clock, hand, data=0.3, host=0.5, callbacks=0.1)
    steps = clock.take()
    assert [round(times.step_time_s, 9) for times in steps] == [0.8, 0.9, 0.9]  # callbacks go to the step after them
    assert sum(times.step_time_s for times in steps) == pytest.approx(hand() - began - 0.1)
    assert steps[1].data_wait_s == pytest.approx(0.3)
    assert steps[1].host_time_s == pytest.approx(0.5)


@pytest.mark.parametrize("with_device", [False, True])
def test_callbacks_can_belong_to_the_step_that_ended(hand, with_device):
    device = FakeDevice(hand) if with_device else None
    clock = StepClock(now=hand, device=device)
    clock.start()
    for first in (True, False):
        clock.begin_step()
        hand.pass_(0.5)
        if device is not None:
            device.issue(0.2)
        clock.end_step()
        clock.settle()
        hand.pass_(3.0 if first else 0.1)
        clock.loop_goes_on(last=first)
    hand.pass_(0.4)
    first, second = clock.take()
    assert first.other_s == pytest.approx(3.0)
    assert first.step_time_s == pytest.approx(3.7 if with_device else 3.5)
    assert second.step_time_s == pytest.approx(0.7 if with_device else 0.5)
    assert first.device_time_s == (pytest.approx(0.7) if with_device else None)


@pytest.mark.parametrize("kind", ["eval", "save", "log"])
def test_pauses_are_not_part_of_a_step_and_are_reported_apart(hand, kind):
    clock = StepClock(now=hand)
    clock.start()
    step(clock, hand, data=0.1, host=0.4)
    hand.pass_(7.0)
    clock.pause(kind)
    step(clock, hand, data=0.1, host=0.4)
    first, second = clock.take()
    assert first.step_time_s == pytest.approx(0.5)
    assert second.step_time_s == pytest.approx(0.5)
    assert getattr(second, f"{kind}_time_s") == pytest.approx(7.0)
    assert second.data_wait_s == pytest.approx(0.1)


def test_v70_rates_follow_the_device_and_not_the_speed_at_which_work_is_issued(hand):
    device = FakeDevice(hand)
    clock = StepClock(now=hand, device=device)
    clock.start()
    for _ in range(5):
        clock.begin_step()
        device.issue(1.0)
        hand.pass_(0.01)  # the host is 100 times faster
        clock.end_step()
        clock.loop_goes_on()
    assert device.waits == 0  # not one wait in five steps
    clock.settle()
    steps = clock.take()
    assert sum(times.step_time_s for times in steps) == pytest.approx(5.0)
    assert sum(times.host_time_s for times in steps) == pytest.approx(0.05)
    assert steps[-1].device_wait_s == pytest.approx(4.95)
    assert [times.device_time_s for times in steps] == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(("settled", "save_time_s"), [(True, 0.5), (False, 1.5)])
def test_only_settling_keeps_queued_work_out_of_the_pause_after_it(hand, settled, save_time_s):
    device = FakeDevice(hand)
    clock = StepClock(now=hand, device=device)
    clock.start()
    clock.begin_step()
    device.issue(1.0)
    clock.end_step()
    clock.loop_goes_on()
    if settled:
        clock.settle()
    device.wait(device.busy_until)  # what writing a checkpoint does first
    hand.pass_(0.5)
    clock.pause("save")
    assert clock.pauses_since_last_step.save_time_s == pytest.approx(save_time_s)
    assert clock.take()[0].step_time_s == pytest.approx(1.0)


def test_steps_are_told_apart_on_the_devices_clock_although_the_host_waits_only_once(hand):
    device = FakeDevice(hand)
    clock = StepClock(now=hand, device=device)
    clock.start()
    for seconds in (3.0, 1.0, 2.0):
        hand.pass_(0.01)
        clock.begin_step()
        device.issue(seconds)
        clock.end_step()
        clock.loop_goes_on()
    clock.settle()
    assert [times.step_time_s for times in clock.take()] == pytest.approx([3.01, 1.0, 2.0])


def test_time_between_a_pause_and_the_next_step_belongs_to_that_step(hand):
    device = FakeDevice(hand)
    clock = StepClock(now=hand, device=device)
    clock.start()
    for _ in range(2):
        hand.pass_(0.2)
        clock.begin_step()
        device.issue(1.0)
        clock.end_step()
        clock.settle()
        hand.pass_(9.0)
        clock.pause("eval")
    assert [times.step_time_s for times in clock.take()] == pytest.approx([1.2, 1.2])


def test_a_device_span_that_is_not_over_is_unknown_and_not_waited_for(hand):
    device = FakeDevice(hand)
    clock = StepClock(now=hand, device=device)
    clock.start()
    clock.begin_step()
    device.issue(1.0)
    clock.end_step()
    assert clock.take()[0].device_time_s is None
    assert device.waits == 0


def test_without_a_device_there_is_no_device_time_and_nothing_to_settle(hand):
    clock = StepClock(now=hand)
    clock.start()
    step(clock, hand, host=1.0)
    hand.pass_(0.2)
    clock.settle()
    clock.pause("log")
    step(clock, hand, host=1.0)
    first, second = clock.take()
    assert first.device_time_s is None
    assert first.step_time_s == pytest.approx(1.0)
    assert second.log_time_s == pytest.approx(0.2)


def test_waiting_for_other_ranks_after_the_batches_came_is_no_data_wait(hand):
    clock = StepClock(now=hand)
    clock.start()
    for _ in range(2):
        hand.pass_(0.1)
        clock.batches_ready()
        hand.pass_(0.6)
        clock.begin_step()
        hand.pass_(0.3)
        clock.end_step()
    for times in clock.take():
        assert times.data_wait_s == pytest.approx(0.1)
        assert times.step_time_s == pytest.approx(1.0)


def test_waits_that_are_timed_inside_a_step_are_no_host_time(hand):
    clock = StepClock(now=hand)
    clock.start()
    clock.begin_step()
    hand.pass_(0.2)
    with clock.waiting():
        hand.pass_(0.7)
    clock.end_step()
    times = clock.take()[0]
    assert times.host_time_s == pytest.approx(0.2)
    assert times.device_wait_s == pytest.approx(0.7)
    assert times.step_time_s == pytest.approx(0.9)


def test_a_wait_outside_a_step_is_not_charged_to_the_next_one(hand):
    clock = StepClock(now=hand)
    clock.start()
    with clock.waiting():
        hand.pass_(5.0)
    clock.begin_step()
    hand.pass_(1.0)
    clock.end_step()
    assert clock.take()[0].host_time_s == pytest.approx(1.0)


def test_starting_again_forgets_what_came_before(hand):
    clock = StepClock(now=hand)
    clock.start()
    step(clock, hand, host=1.0)
    clock.begin_step()
    hand.pass_(60.0)
    clock.start()
    step(clock, hand, data=0.1, host=0.2)
    assert [times.step_time_s for times in clock.take()] == pytest.approx([0.3])
    assert not clock.in_step


def test_steps_are_taken_once(hand):
    clock = StepClock(now=hand)
    clock.start()
    step(clock, hand, host=1.0)
    assert len(clock.take()) == 1
    assert clock.take() == []
