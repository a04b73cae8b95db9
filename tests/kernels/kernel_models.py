"""Random models of a few thousand parameters, one per family, and packed rows for them."""

import torch
import torch.nn.functional as F

VOCABULARY = 61


def tiny_model(family, **changes):
    """Three recurrent (or convolution) layers and one with full attention, in float32, always the same weights."""
    import transformers

    torch.manual_seed(0)
    config_class, model_class, own = FAMILY_SETTINGS[family]
    config = getattr(transformers, config_class)(**{**COMMON, **own, **changes})
    return getattr(transformers, model_class)(config)


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILY_SETTINGS = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**DELTA_NET, **EXPERTS}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA_NET, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", DELTA_NET),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv"] * 3 + ["full_attention"]}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
}


def random_documents(lengths, seed=1):
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=make) for length in lengths]


def packed_row(documents, slots=None):
    """What training hands to the model: one row, the tail (if any) as one document without targets."""
    lengths = [len(document) for document in documents]
    labels = [F.pad(document[1:], (1, 0), value=-100) for document in documents]
    tail = (slots or sum(lengths)) - sum(lengths)
    if tail:
        documents, labels = [*documents, torch.zeros(tail).long()], [*labels, torch.full((tail,), -100)]
        lengths = [*lengths, tail]
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)
    inputs = {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": numbers[None],
        "use_cache": False,
    }
    return inputs, torch.cat(labels)[None]


def summed_loss(model, inputs, labels):
    logits = model(**inputs).logits[0, :-1]
    return F.cross_entropy(logits.float(), labels[0, 1:], reduction="sum", ignore_index=-100)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()])


def gradients_one_document_at_a_time(model, documents):
    """The reference: no packing, no boundary argument, transformers as it comes."""
    targets = sum(len(document) - 1 for document in documents)
    losses = (
        summed_loss(model, {"input_ids": d[None], "use_cache": False}, F.pad(d[1:], (1, 0), value=-100)[None])
        for d in documents
    )
    return gradients(model, sum(losses) / targets)


def packed_gradients(model, documents, slots=None):
    inputs, labels = packed_row(documents, slots)
    return gradients(model, summed_loss(model, inputs, labels) / (labels != -100).sum())
