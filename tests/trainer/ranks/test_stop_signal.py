"""The flags that ride on the count of target tokens."""

import os
import pty

import pytest
import torch

from hf_speedkit.trainer.ranks.stop_signal import StopSignal, leave_terminal


class OtherRanks:
    """An accelerator whose other ranks have these counts and flags; only `gather` is used."""

    def __init__(self, *others):
        self.num_processes = 1 + len(others)
        self._others = torch.tensor(others, dtype=torch.int64)

    def gather(self, own):
        return torch.cat((own.reshape(1), self._others))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("others", [(7, 0), (7, (1 << 40) + 9), (1 << 39, (1 << 40) + (1 << 39))])
def test_the_counts_arrive_as_they_were_and_the_flags_beside_them(told, others):
    signal = StopSignal(["SIGTERM"])
    accelerator = OtherRanks(*others)
    with signal.installed():
        signal.received = "SIGTERM" if told else None
        with signal.riding_on(accelerator):
            counts = accelerator.gather(torch.tensor(5))
    assert counts.tolist() == [5, *(other % (1 << 40) for other in others)]
    assert counts.dtype == torch.int64
    assert int(signal._flags) == told + sum(other >> 40 for other in others)
    assert accelerator.gather(torch.tensor(5)).tolist() == [5, *others], "the wrapper is gone"


@pytest.mark.parametrize(
    ("names", "wanted", "others"),
    [([], True, (7,)), (["SIGTERM"], False, (7,)), (["SIGTERM"], True, ())],
    ids=["no signals", "no checkpoints", "one process"],
)
def test_nothing_rides_where_nothing_is_wanted_or_nobody_is_there(names, wanted, others):
    accelerator = OtherRanks(*others)
    signal = StopSignal(names)
    with signal.installed(wanted), signal.riding_on(accelerator):
        assert "gather" not in vars(accelerator)
        assert not signal.agreed()


def test_a_gather_that_somebody_has_put_there_comes_back():
    accelerator = OtherRanks(7)
    accelerator.gather = lambda own: torch.stack((own, own))
    signal = StopSignal(["SIGTERM"])
    with signal.installed(), signal.riding_on(accelerator):
        assert accelerator.gather(torch.tensor(5)).tolist() == [5, 5]
    assert accelerator.gather(torch.tensor(4)).tolist() == [4, 4]
    with pytest.raises(ZeroDivisionError), signal.installed(), signal.riding_on(accelerator):
        raise ZeroDivisionError
    assert accelerator.gather(torch.tensor(3)).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("variables", "ends"),
    [
        (["ACCELERATE_MIXED_PRECISION"], True),
        (["ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"], False),
        ([], False),
    ],
)
def test_a_process_whose_accelerate_launch_is_gone_ends_for_that_launcher_hands_no_signal_on(
    monkeypatch, variables, ends
):
    for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "no")
    signal = StopSignal(["SIGTERM"])
    with signal.installed():
        assert not signal.agreed()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert signal.agreed() is ends
    assert signal.received == ("the end of accelerate launch" if ends else None)


def test_what_is_printed_behind_a_lost_connection_goes_nowhere_and_a_file_keeps_it(tmp_path):
    master, terminal = pty.openpty()
    os.close(master)
    reader, pipe = os.pipe()
    os.close(reader)
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    try:
        for lost in (terminal, pipe):
            with pytest.raises(OSError, match=r"Input/output|Broken pipe"):
                os.write(lost, b"a progress bar")
        closed = os.dup(file)
        os.close(closed)
        leave_terminal([terminal, pipe, file, closed])
        for stream in (terminal, pipe, file, closed):
            os.write(stream, b"a progress bar")
        os.close(closed)
    finally:
        for stream in (terminal, pipe, file):
            os.close(stream)
    assert (tmp_path / "log").read_text().strip() == "a progress bar"
