"""The loss head against torch's cross-entropy."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hf_speedkit.kernels import loss_head
from hf_speedkit.kernels.loss_head import loss_head_error, target_sums

# Of the largest gradient: fp32 rounds at 6e-8 and sums 50 products; bf16 keeps 8 bits, rounded twice.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def inputs(count, *, dtype=torch.float32, vocabulary=50, width=16, device="cpu"):
    generator = torch.Generator().manual_seed(count)
    hidden = (torch.randn(count, width, generator=generator) / width**0.5).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (count,), generator=generator).to(device)


def plain(hidden, weight, targets, factor=1.0):
    hidden, weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    logits = hidden @ weight.t()
    loss = functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    (loss * factor).backward()
    return logits.detach(), loss.detach(), hidden.grad, weight.grad


def close(ours, expected, tolerance):
    return (ours.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 23, 1000], ids="rows_at_once_{}".format)
def test_sums_and_gradients_are_those_of_cross_entropy(dtype, rows, monkeypatch):
    hidden, weight, targets = inputs(23, dtype=dtype)
    monkeypatch.setattr(loss_head, "LOGITS_BYTES", rows * 50 * dtype.itemsize)
    sums = target_sums(hidden, weight, targets)
    (sums.nll * 0.25).backward()
    logits, loss, grad_hidden, grad_weight = plain(hidden, weight, targets, 0.25)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(sums.nll.detach(), loss, rtol=tolerance, atol=0)
    assert close(hidden.grad, grad_hidden, tolerance)
    assert close(weight.grad, grad_weight, tolerance)
    p = logits.softmax(-1)
    torch.testing.assert_close(sums.entropy, -(p * p.log()).sum(), rtol=tolerance, atol=0)
    assert sums.correct == (logits.argmax(-1) == targets).sum()
    assert sums.targets == 23


def test_rows_with_a_negative_target_count_nowhere():
    hidden, weight, targets = inputs(9)
    targets[[2, 5]] = -100
    sums = target_sums(hidden, weight, targets)
    sums.nll.backward()
    _, loss, grad_hidden, grad_weight = plain(hidden, weight, targets)
    torch.testing.assert_close(sums.nll.detach(), loss)
    assert sums.targets == 7
    assert hidden.grad[[2, 5]].abs().max() == 0
    assert close(hidden.grad, grad_hidden, 1e-5)
    assert close(weight.grad, grad_weight, 1e-5)


def test_no_targets_give_a_differentiable_zero():
    hidden, weight, targets = inputs(0)
    sums = target_sums(hidden, weight, targets)
    sums.nll.backward()
    assert (sums.nll, sums.entropy, sums.correct, sums.targets) == (0, 0, 0, 0)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_evaluation_makes_one_product_and_training_three():
    hidden, weight, targets = inputs(9)
    products = []
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), FlopCounterMode(display=False) as counter:
            target_sums(hidden, weight, targets)
        products.append(counter.get_total_flops() / (2 * hidden.numel() * len(weight)))
    assert products == [1, 3]


def test_a_frozen_weight_gets_no_gradient_and_evaluation_none_at_all():
    hidden, weight, targets = inputs(5)
    sums = target_sums(hidden, weight.detach(), targets)
    sums.nll.backward()
    assert weight.grad is None
    assert close(hidden.grad, plain(hidden, weight, targets)[2], 1e-5)
    with torch.no_grad():
        assert torch.equal(target_sums(hidden, weight, targets).nll, sums.nll.detach())


def test_autocast_computes_in_its_dtype_and_keeps_the_parameters_dtype():
    hidden, weight, targets = inputs(23)
    with torch.autocast("cpu", torch.bfloat16):
        target_sums(hidden, weight, targets).nll.backward()
    assert weight.grad.dtype == torch.float32
    grad_weight = plain(hidden, weight, targets)[3]
    assert close(weight.grad, grad_weight, 2**-6)  # the inputs are rounded as well
    assert not close(weight.grad, grad_weight, 1e-5)


def test_a_second_backward_pass_is_refused_with_a_reason():
    sums = target_sums(*inputs(5))
    sums.nll.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by the first backward pass"):
        sums.nll.backward()


def test_equal_logits_are_correct_only_for_the_first():
    hidden, weight = torch.ones(2, 4), torch.ones(6, 4)
    assert target_sums(hidden, weight, torch.tensor([0, 3])).correct == 1


def test_the_parity_check_sees_a_wrong_gradient(monkeypatch):
    assert loss_head_error(torch.device("cpu"), torch.float32, vocabulary=101) < 1e-5
    accumulate = loss_head._accumulate

    def wrong(total, left, right, *, first):
        accumulate(total, 1.5 * left, right, first=first)

    monkeypatch.setattr(loss_head, "_accumulate", wrong)
    assert loss_head_error(torch.device("cpu"), torch.float32, vocabulary=101) > 0.4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("vocabulary", [50, 4096, 248_320])
def test_sums_and_gradients_are_those_of_cross_entropy_on_a_gpu(dtype, vocabulary, monkeypatch):
    hidden, weight, targets = inputs(300, dtype=dtype, vocabulary=vocabulary, width=64, device="cuda")
    targets[7] = -100
    monkeypatch.setattr(loss_head, "LOGITS_BYTES", 128 * vocabulary * dtype.itemsize)
    sums = target_sums(hidden, weight, targets)
    sums.nll.backward()
    logits, loss, grad_hidden, grad_weight = plain(hidden, weight, targets)
    # fp32 products run in TF32 or not by torch's default: not.
    tolerance = TOLERANCES[dtype] * 2
    torch.testing.assert_close(sums.nll.detach(), loss, rtol=tolerance, atol=0)
    assert close(hidden.grad, grad_hidden, tolerance)
    assert close(weight.grad, grad_weight, tolerance)
    assert abs(sums.correct.item() - (logits.argmax(-1) == targets).sum().item()) <= 2  # near ties under rounding


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_head_never_waits_for_the_gpu():
    hidden, weight, targets = inputs(300, dtype=torch.bfloat16, vocabulary=4096, width=64, device="cuda")
    target_sums(hidden, weight, targets).nll.backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        target_sums(hidden, weight, targets).nll.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
