"""Ranks that cannot train together are told before the model is prepared."""

import pytest
import torch
from support import tiny_llama
from transformers import TrainingArguments

from hf_speedkit.core.errors import CheckpointError, ConfigurationError
from hf_speedkit.trainer.ranks.alike import Surroundings, refuse_unlike, surroundings, weight_sample


def of_rank(path, rank=0, **changes):
    values = {"output_dir": str(path), "use_cpu": True, "accelerator_config": {"split_batches": False}, **changes}
    return surroundings(TrainingArguments(**values, run_name=f"run of rank {rank}"), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-3},
        {"max_steps": 7},
        {"gradient_accumulation_steps": 2},
        {"logging_steps": 3},
        {"save_strategy": "epoch"},
        {"optim": "sgd"},
        {"lr_scheduler_kwargs": {"a": 1}},
        {"output_dir": "elsewhere"},
        {"seed": 1},
        {"data_seed": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_v34_a_setting_that_differs_is_named_with_its_values(tmp_path, changes):
    ranks = [of_rank(tmp_path), of_rank(tmp_path, 1), of_rank(tmp_path, **changes)]
    assert refuse_unlike(ranks[:2]) == (), "a name of one's own is no reason"
    name = "seed" if "data_seed" in changes else next(iter(changes))
    with pytest.raises(ConfigurationError, match=f"different settings: {name}\n  {name}: .* on rank 0, .* on rank 2"):
        refuse_unlike(ranks)


def test_v34_a_seed_for_dropout_may_follow_the_rank_and_so_may_folders_of_nodes(tmp_path):
    ranks = [
        of_rank(tmp_path, seed=rank, data_seed=5, output_dir=str(rank), save_on_each_node=True) for rank in range(2)
    ]
    assert refuse_unlike(ranks) == ()


def test_v34_another_version_or_gpu_is_said_and_stops_nothing(tmp_path):
    stacks = [{"torch": "2.13.0", "GPU": "NVIDIA H200"}, {"torch": "2.12.1", "GPU": "NVIDIA H200"}]
    ranks = [Surroundings(settings={}, stack=stack) for stack in stacks]
    assert refuse_unlike(ranks) == ("torch: 2.13.0 on rank 0, 2.12.1 on rank 1",)
    assert of_rank(tmp_path).stack["torch"].startswith("2.")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.model.norm.requires_grad_(False),
        lambda model: model.resize_token_embeddings(70),
        lambda model: model.add_module("more", torch.nn.Linear(1, 1)),
    ],
    ids=["dtype", "frozen", "shape", "name"],
)
def test_v39_ranks_whose_models_differ_are_refused(tmp_path, change):
    models = [tiny_llama(seed=rank) for rank in range(3)]
    change(models[2])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    ranks = [surroundings(args, model) for model in models]
    assert refuse_unlike(ranks[:2]) == ()
    with pytest.raises(ConfigurationError, match=r"1 of 3 ranks have another model(.|\n)*rank 2"):
        refuse_unlike(ranks)


def test_v41_ranks_that_shard_copies_of_other_weights_are_refused():
    samples = [weight_sample(tiny_llama(seed=seed)) for seed in (0, 0, 1)]
    ranks = [Surroundings(settings={}, stack={}, weights=sample) for sample in samples]
    assert refuse_unlike(ranks[:2]) == ()
    with pytest.raises(CheckpointError, match=r"1 of 3 ranks have read other weights(.|\n)*rank 2"):
        refuse_unlike(ranks)


def test_v41_weights_that_are_still_to_come_are_not_compared_nor_adapters():
    model = tiny_llama()
    before = weight_sample(model)
    model.lora_A = torch.nn.Parameter(torch.randn(3))
    assert weight_sample(model) == before != ""
    assert weight_sample(model.to("meta")) == ""
