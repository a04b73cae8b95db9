"""NEFTune in packed rows: a document gets the noise it would get alone."""

import pytest
import torch
from support import tiny_hybrid
from test_sft import trainer_for
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_speedkit.trainer.step.noise import document_noise

ALPHA, LENGTHS = 5.0, (4, 100, 1000)
EDGES = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


class Embedder(torch.nn.Module):
    """A model that is its embedding."""

    def __init__(self, width=64):
        super().__init__()
        self.table = torch.nn.Embedding(9, width)

    def get_input_embeddings(self):
        return self.table

    def forward(self, ids, **_):
        return self.table(ids)


def added(model, ids, **given):
    with document_noise(model, ALPHA), torch.no_grad():
        return (model(ids, **given) - model.table.weight[ids])[0]


def test_each_document_gets_the_noise_that_transformers_gives_it_alone():
    torch.manual_seed(0)
    model, ids = Embedder().train(), torch.randint(9, (1, sum(LENGTHS)))
    noise = added(model, ids, cu_seq_lens_q=EDGES)
    model.table.neftune_noise_alpha = ALPHA
    for document, length in zip(noise.split(LENGTHS), LENGTHS, strict=True):
        alone = neftune_post_forward_hook(model.table, None, torch.zeros(1, length, 64))
        bound = ALPHA / (length * 64) ** 0.5
        for one in (document, alone):
            assert one.abs().max() <= bound * (1 + 1e-5)  # a difference of sums in fp32
            assert one.abs().max() > 0.95 * bound  # of 256 draws and more
            # Of a uniform draw: bound / sqrt(3); four standard deviations of that of 256 draws are 11 %.
            assert one.std() == pytest.approx(bound / 3**0.5, rel=0.11)


def test_a_row_without_boundaries_is_one_document_and_an_evaluation_is_left_alone():
    model, ids = Embedder().train(), torch.zeros(1, 400, dtype=torch.int64)
    assert 0.95 * ALPHA / 160 < added(model, ids).abs().max() < 1.01 * ALPHA / 160
    assert not added(model.eval(), ids, cu_seq_lens_q=EDGES).any()


def test_the_trainers_noise_is_each_documents_and_gone_afterwards(tmp_path):
    model, seen = tiny_hybrid(), []
    trainer = trainer_for(tmp_path, model=model, max_steps=2, neftune_noise_alpha=ALPHA, learning_rate=0.0)

    def look(module, args, kwargs):
        if model.training and trainer.state.global_step == 1:
            seen.append(kwargs)

    def look_inside(module, args):
        if model.training and trainer.state.global_step == 1:
            seen[-1] = (seen[-1], args[0].detach())

    handles = [
        model.register_forward_pre_hook(look, with_kwargs=True),
        model.model.layers[0].register_forward_pre_hook(look_inside),
    ]
    trainer.train()
    for handle in handles:
        handle.remove()
    ((given, hidden),) = seen
    table = model.get_input_embeddings()
    noise = (hidden - table.weight[given["input_ids"]]).abs().amax(dim=-1)[0].detach()
    lengths = given["cu_seq_lens_q"].diff().tolist()
    assert len(lengths) > 1
    for document, length in zip(noise.split(lengths), lengths, strict=True):
        bound = ALPHA / (length * table.embedding_dim) ** 0.5
        assert 0.9 * bound < document.max() <= bound * (1 + 1e-4), "of a length's own, not of the row's"
    assert not table._forward_hooks
    assert not hasattr(table, "neftune_noise_alpha")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # as an error it would leave the mode switched on
def test_on_a_gpu_nothing_waits_for_the_device():
    model, ids = Embedder().train().cuda().bfloat16(), torch.zeros(1, sum(LENGTHS), dtype=torch.int64, device="cuda")
    edges = EDGES.cuda()
    with document_noise(model, ALPHA):
        model(ids, cu_seq_lens_q=edges)
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            model(ids, cu_seq_lens_q=edges)
        finally:
            torch.cuda.set_sync_debug_mode(before)
