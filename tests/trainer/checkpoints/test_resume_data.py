"""A resume that would see other documents than the saved run would have seen is refused."""

from contextlib import nullcontext
from functools import partial

import pytest
from checkpoint_run import small
from support import tokenized
from transformers import TrainerState

from hf_speedkit.core.errors import PackingError
from hf_speedkit.packing.sampler import PackedBatchSampler
from hf_speedkit.trainer.data.resume import compare_documents, data_of_rank, refuse_ranks_apart


@pytest.mark.parametrize(
    ("dataset", "changes", "said", "mend"),
    [
        pytest.param(tokenized([9, 4, 17]), {}, "documents: other ones", "settings and data", id="other data"),
        pytest.param(None, {"tokens_per_batch": 64}, "tokens_per_batch: saved 32, now 64", "settings", id="rows"),
        pytest.param(
            None, {"gradient_accumulation_steps": 2}, "packs_per_step: saved 1, now 2", "divides 1", id="step"
        ),
    ],
)
def test_a_resume_that_would_see_other_documents_is_refused_with_a_way_on(copy, dataset, changes, said, mend):
    if "gradient_accumulation_steps" in changes:
        mend = "gradient_accumulation_steps=1 gives 1 rank the saved steps"
    with pytest.raises(PackingError) as refused:
        small(copy, dataset=dataset, max_steps=5, **changes).train(resume_from_checkpoint=True)
    assert said in str(refused.value)
    assert mend in str(refused.value)
    assert "ignore_data_skip=True" in str(refused.value)
    small(copy, dataset=dataset, max_steps=5, ignore_data_skip=True, **changes).train(resume_from_checkpoint=True)


def test_a_resume_on_rows_of_another_kind_is_refused_unless_the_data_begins_anew():
    sampler, data = PackedBatchSampler([5, 6], tokens_per_batch=8), tokenized([5, 6])
    kinds = {"packed": (sampler, False), "padded": (None, False), "streamed": (None, True)}
    for before in kinds:
        for now, (its_sampler, streamed) in kinds.items():
            state = TrainerState(global_step=0)
            compare_documents(state, kinds[before][0], data, ignore=False, streamed=kinds[before][1])
            state.global_step = 1
            compared = partial(compare_documents, state, its_sampler, data, streamed=streamed)
            if before != now:
                with pytest.raises(PackingError, match="the saved run trained on") as refused:
                    compared(ignore=False)
                assert "ignore_data_skip=True" in str(refused.value)
            compared(ignore=True)
            compared(ignore=False)


def test_v35_ranks_with_other_evaluation_rows_are_told_apart_and_like_ones_are_not():
    """Each rank counts its own rows: one would evaluate once more than the other, and wait."""
    state = TrainerState()

    def rank(*sets, **named):
        return data_of_rank(state, named or (sets[0] if sets else None))

    same = [rank(tokenized([5, 6])), rank(tokenized([5, 6]))]
    refuse_ranks_apart(same)
    refuse_ranks_apart([rank(), rank()])
    refuse_ranks_apart([rank(a=tokenized([5]), b=tokenized([6]))] * 2)
    for ranks, what in (
        ([same[0], rank(tokenized([5, 7]))], "the evaluation data"),
        ([same[0], rank(tokenized([5, 6], targets_from=1))], "the evaluation data"),
        ([rank(), same[0]], "the evaluation data"),
        ([rank(a=tokenized([5]), b=tokenized([6])), rank(a=tokenized([5]), b=tokenized([7]))], "the evaluation data b"),
    ):
        with pytest.raises(PackingError, match=f"1 of 2 ranks have other documents than rank 0 in {what}\n") as refused:
            refuse_ranks_apart(ranks)
        assert "rank 1:" in str(refused.value)


def test_a_resume_with_other_targets_in_documents_of_the_same_lengths_is_refused(copy):
    from checkpoint_run import LENGTHS

    masked = tokenized(LENGTHS, targets_from=1)
    with pytest.raises(PackingError, match="tokens or targets differ"):
        small(copy, dataset=masked, max_steps=5).train(resume_from_checkpoint=True)


PADDED = {"packing": False, "documents": 4, "documents_per_step": 2, "seed": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"seed": 2}, "seed: saved 1, now 2"),
        ({"documents_per_step": 4}, "documents_per_step: saved 2, now 4"),
        ({"documents": 5}, "documents: saved 4, now 5"),
        (None, "train on other documents"),
    ],
)
def test_a_padded_resume_that_would_skip_other_documents_is_refused(changed, message):
    """Trainer skips as many batches as the saved run took, whatever is in them."""
    state = TrainerState()
    compare_documents(state, None, tokenized([4, 5, 6, 7]), ignore=False, padded=PADDED)
    state.global_step = 3
    again = tokenized([4, 5, 6, 7], seed=int(changed is None))
    with pytest.raises(PackingError, match=message) if message else nullcontext():
        compare_documents(state, None, again, ignore=False, padded=PADDED | (changed or {}))
    compare_documents(state, None, again, ignore=True, padded=PADDED | (changed or {}))
