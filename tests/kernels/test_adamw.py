"""FusedAdamW: torch's AdamW with clipping folded into the update."""

import copy

import pytest
import torch
import torch.distributed as dist
from rank_processes import start_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

from hf_speedkit.kernels.adamw import FusedAdamW, fused_adamw_error


def model_pair():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, copy.deepcopy(model)


def give_gradients(model, step, size):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = size * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("size", [1e-4, 10.0], ids=["below_the_limit", "clipped"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_equal_torchs_clipping_and_adamw(size, weight_decay):
    ours, theirs = model_pair()
    mine = FusedAdamW(ours.parameters(), lr=1e-2, weight_decay=weight_decay)
    stock = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=weight_decay, fused=True)
    for step in range(10):
        give_gradients(ours, step, size)
        give_gradients(theirs, step, size)
        norm = mine.clip_grad_norm_(ours.parameters(), 1.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        torch.testing.assert_close(norm, expected)
        mine.step()
        stock.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # 1e-4 of a step of 1e-2; fp32 rounds 0.3 at 3e-8


def test_the_scale_is_used_once():
    ours, theirs = model_pair()
    mine = FusedAdamW(ours.parameters(), lr=1e-2)
    stock = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    hooks = []
    mine.register_step_pre_hook(lambda *_: hooks.append("before"))
    mine.register_step_post_hook(lambda *_: hooks.append("behind"))
    give_gradients(ours, 0, 10.0)
    mine.clip_grad_norm_(ours.parameters(), 1.0)
    mine.step()
    give_gradients(theirs, 0, 10.0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    stock.step()
    for model, optimizer in ((ours, mine), (theirs, stock)):
        give_gradients(model, 1, 10.0)
        optimizer.step()  # not clipped
    assert hooks == ["before", "behind"] * 2, "once a step, although torch's step has hooks too"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_an_infinite_limit_only_measures():
    ours, theirs = model_pair()
    mine, stock = FusedAdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for model in (ours, theirs):
        give_gradients(model, 0, 10.0)
    assert mine.clip_grad_norm_(ours.parameters(), float("inf")) > 1
    mine.step()
    stock.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}], ids=str)
def test_the_state_of_an_adamw_that_is_not_fused_is_taken_over(settings):
    """Such a state says fused=None for its groups and holds its steps on the host: no kernel of ours can read them."""
    ours, theirs = model_pair()
    stock = torch.optim.AdamW(theirs.parameters(), lr=1e-2, **settings)
    give_gradients(theirs, 0, 1.0)
    stock.step()
    ours.load_state_dict(theirs.state_dict())
    mine = FusedAdamW(ours.parameters(), lr=1e-2)
    mine.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert all(group["fused"] and not group["foreach"] for group in mine.param_groups)
    for model in (ours, theirs):
        give_gradients(model, 1, 10.0)
    mine.clip_grad_norm_(ours.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    mine.step()
    stock.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu_steps_saved_on_the_host_are_moved_to_it():
    weight = torch.nn.Parameter(torch.randn(64, device="cuda"))
    stock = torch.optim.AdamW([weight], lr=1e-2)
    weight.grad = torch.randn_like(weight)
    stock.step()
    mine = FusedAdamW([weight], lr=1e-2)
    mine.load_state_dict(stock.state_dict())
    mine.step()
    assert mine.state[weight]["step"].device == weight.device
    assert mine.state[weight]["step"].item() == 2


def test_its_state_is_torchs_and_goes_both_ways():
    ours, theirs = model_pair()
    mine, stock = FusedAdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for model, optimizer in ((ours, mine), (theirs, stock)):
        give_gradients(model, 0, 1.0)
        optimizer.step()
    mine.load_state_dict(copy.deepcopy(stock.state_dict()))
    stock.load_state_dict(copy.deepcopy(mine.state_dict()))
    for model, optimizer in ((ours, mine), (theirs, stock)):
        give_gradients(model, 1, 1.0)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_parameters_without_gradients_are_left_alone():
    ours, _ = model_pair()
    before = [p.clone() for p in ours.parameters()]
    optimizer = FusedAdamW(ours.parameters(), lr=1e-2)
    assert optimizer.clip_grad_norm_(ours.parameters(), 1.0) == 0
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parity_check_sees_a_wrong_update(dtype, monkeypatch):
    assert fused_adamw_error(torch.device("cpu"), dtype) == 0
    monkeypatch.setattr(FusedAdamW, "clip_grad_norm_", None)
    step = FusedAdamW.step

    def doubled(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 2
        return step(self, closure)

    monkeypatch.setattr(FusedAdamW, "step", doubled)
    assert fused_adamw_error(torch.device("cpu"), dtype) > 0.5


def _norms(rank, results):
    dist.init_process_group("gloo", init_method=f"file://{results}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = [torch.arange(1.0, 13.0).view(6, 2), torch.tensor([3.0])]  # the second is too small for two ranks
    parameters = []
    for value, placement in zip([*full, full[0]], [Shard(0), Shard(0), Replicate()], strict=True):
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, [placement]))
        parameter.grad = distribute_tensor(value, mesh, [placement])
        parameters.append(parameter)
    optimizer = FusedAdamW(parameters, lr=1e-2)
    norm = optimizer.clip_grad_norm_(parameters, 1.0).item()
    optimizer.step()
    strided = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [_StridedShard(0, split_factor=1)]))
    strided.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [_StridedShard(0, split_factor=1)])
    assert optimizer.clip_grad_norm_([strided], 1.0).item() == pytest.approx(50**0.5), "both ranks' parts"
    partial = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Partial()]))
    partial.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="fused_optimizer=False"):
        optimizer.clip_grad_norm_([partial], 1.0)
    torch.save((norm, [p.full_tensor().detach() for p in parameters]), f"{results}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.two_process
def test_sharded_and_replicated_gradients_count_once(tmp_path):
    start_ranks(_norms, str(tmp_path))
    full = [torch.arange(1.0, 13.0).view(6, 2), torch.tensor([3.0])]
    full.append(full[0])
    parameters = [torch.nn.Parameter(torch.zeros_like(value)) for value in full]
    for parameter, value in zip(parameters, full, strict=True):
        parameter.grad = value.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, lr=1e-2, fused=True).step()
    for rank in (0, 1):
        norm, values = torch.load(tmp_path / f"{rank}.pt")
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        for a, b in zip(values, parameters, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_with_torchs_on_a_gpu(dtype):
    assert fused_adamw_error(torch.device("cuda"), dtype) < {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]


@pytest.mark.gpu
def test_the_kernels_norm_is_that_of_float64_on_a_gpu():
    gradients = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (1, 4095, 4096, 10_000_019)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = FusedAdamW(parameters, lr=1e-3).clip_grad_norm_(parameters, 1.0)
    expected = sum(g.double().square().sum() for g in gradients).sqrt()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
