"""The flags that ride on the count of target tokens."""

import pytest
import torch

from hf_speedkit.trainer.ranks.stop_signal import StopSignal


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
