import pytest
import torch

from hf_speedkit.core.errors import PackingError
from hf_speedkit.packing.boundaries import check_packed_batch, packed_documents


def batch(lengths=(4, 2), **changes):
    slots = sum(lengths)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    labels = torch.arange(slots)[None].clone()
    labels[0, edges[:-1].long()] = -100
    made = {
        "input_ids": torch.arange(slots)[None],
        "labels": labels,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": edges,
    }
    made.update(changes)
    return {key: value for key, value in made.items() if value is not None}


def lengths_of(documents):
    return [document.length for document in documents]


def test_documents_are_read_from_lengths_and_positions_alike():
    for left_out in ("cu_seq_lens_q", "position_ids"):
        assert lengths_of(packed_documents(batch((3, 1, 1, 5), **{left_out: None}))) == [3, 1, 1, 5]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_v14_positions_may_start_anywhere(first):
    positions = torch.cat([torch.arange(3), torch.arange(5)])[None] + first
    assert lengths_of(packed_documents(batch((3, 5), position_ids=positions, cu_seq_lens_q=None))) == [3, 5]


def test_v24_token_values_say_nothing_about_boundaries():
    ids = torch.tensor([[5, 0, 6, 0, 7, 0]])  # eos is 0, and chat turns end with it too
    assert lengths_of(packed_documents(batch((4, 2), input_ids=ids))) == [4, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"input_ids": torch.zeros(3, 20, dtype=torch.long)}, r"one row \[1, slots\]", id="v09 three rows"),
        pytest.param({"attention_mask": torch.ones(1, 6)}, "attention_mask beside", id="v13 a mask beside boundaries"),
        pytest.param({"position_ids": torch.zeros(3, 1, 6)}, r"\[4, 1, slots\]", id="v08 three-axis positions"),
        pytest.param({"position_ids": torch.arange(6)[None]}, "describe different documents", id="v12 no restart"),
        pytest.param({"position_ids": None}, "lacks position_ids", id="v07 lengths without positions"),
        pytest.param({"labels": torch.arange(6)[None]}, "score the first token of 1 of 2", id="first tokens scored"),
        pytest.param({"position_ids": torch.arange(6)}, "one value for each token", id="v08 positions of one axis"),
        pytest.param({"position_ids": torch.arange(5)[None]}, "one value for each token", id="v12 positions too few"),
        pytest.param({"labels": torch.full((1, 5), -100)}, "one value for each token", id="v21 labels too few"),
        pytest.param(
            {"cu_seq_lens_q": torch.tensor([0, 4, 5], dtype=torch.int32)}, "from 0 to the number of slots", id="short"
        ),
        pytest.param({"cu_seq_lens_q": torch.tensor([[0, 4, 6]])}, "in one axis", id="v06 lengths of two axes"),
        pytest.param({"cu_seq_lens_k": torch.tensor([0, 6])}, "cu_seq_lens_k and position_ids", id="v06 keys see all"),
        pytest.param({"seq_idx": torch.zeros(1, 6)}, "seq_idx and position_ids", id="v06 one document for the scan"),
    ],
)
def test_a_batch_that_would_leak_or_mislead_is_refused(changes, message):
    with pytest.raises(PackingError, match=message):
        check_packed_batch(batch(**changes))


def test_rows_instead_of_a_batch_are_refused():
    with pytest.raises(PackingError, match="is a list"):
        check_packed_batch([batch()])


def test_a_batch_without_any_boundary_is_refused_with_the_way_to_make_one():
    with pytest.raises(PackingError, match="PackedCollator"):
        packed_documents({"input_ids": torch.zeros(1, 6)})


def test_required_keys_are_named_when_missing():
    with pytest.raises(PackingError, match="lacks seq_idx"):
        check_packed_batch(batch(), required=("seq_idx",))


def test_a_complete_batch_passes():
    assert lengths_of(check_packed_batch(batch((4, 2)))) == [4, 2]
