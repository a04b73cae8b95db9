"""NEFTune in packed rows: noise on the embeddings, in the measure of each document and not of the row.

The noise of a token is uniform in +-alpha / sqrt(L d), L the tokens of its sequence and d the width
(https://arxiv.org/abs/2310.05914, algorithm 1). transformers 5.23 takes the row's slots for L
(integrations/neftune.py): in 8,192 slots a document of 500 tokens would get a quarter of the noise it gets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_speedkit.trainer.adapters import below_adapters


@contextmanager
def document_noise(model: Any, alpha: float) -> Iterator[None]:
    """Add noise to the input embeddings for the time of the context, while the model is in training mode.

    Args:
        model: a transformers model (a PEFT wrapper is fine), called with `cu_seq_lens_q` for packed rows; without it a
            row is one document, as for transformers.
        alpha: `neftune_noise_alpha`.

    Cost: a tensor of the embeddings' size while they are made; nothing waits for the device.
    """
    noise = _Noise(alpha)
    handles = (
        model.register_forward_pre_hook(noise.look_at, with_kwargs=True),
        below_adapters(model).get_input_embeddings().register_forward_hook(noise.add),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Noise:
    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._edges: torch.Tensor | None = None

    def look_at(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: where its documents end."""
        self._edges = kwargs.get("cu_seq_lens_q")

    def add(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, T, d] with noise."""
        if not module.training:
            return output
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise.mul_(self._measure(output))

    def _measure(self, output: torch.Tensor) -> torch.Tensor | float:
        """The largest noise of each token, [1, T, 1]."""
        slots, width = output.shape[1:]
        if self._edges is None:
            return float(self._alpha / (slots * width) ** 0.5)
        lengths = self._edges.diff()
        # With the size given, the host does not wait for the sum of the lengths.
        of_token = torch.repeat_interleave(lengths, lengths, output_size=slots)
        return (self._alpha * (of_token * width).rsqrt())[None, :, None].to(output.dtype)
