"""Proof that documents in one packed row do not see one another, in outputs and in gradients.

Two questions are asked of the model that will train, through the call that training makes:

1. Do the log-probabilities of one document change when every *other* document's tokens are replaced?
2. Is the gradient of that document's log-probabilities zero at every other document's embeddings?

Both must be exactly zero: nothing of another document enters the arithmetic of an isolated one, so even the rounding
is the same. The loss cannot answer this: in a tiny model a leaking recurrence moved it by 3e-5 and the gradient by
4e-2 (a first look). The same call also shows that the probe is alive: the document's own gradient must not be zero,
and the other documents' log-probabilities must move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import IsolationError, PackingError
from hf_speedkit.core.records import IsolationReport
from hf_speedkit.packing.boundaries import IGNORE_INDEX, Document, check_packed_batch
from hf_speedkit.packing.operations import OperationProbe
from hf_speedkit.packing.placement import placement_change, placement_tolerance
from hf_speedkit.packing.refusal import KERNELS_OR_PADDING, isolation_error

if TYPE_CHECKING:
    import torch

# exp(-6) = 0.0025: a state that forgets 0.25 % a token. Random initialisation forgets so fast that a leak drops below
# bf16 noise, while trained slow heads keep it (case V04).
_SLOW_DECAY_A_LOG = -6.0


def assert_isolation(
    model: torch.nn.Module, batch: Mapping[str, Any], *, tolerance: float | None = None
) -> IsolationReport:
    """Prove isolation on a real packed batch, or refuse.

    Args:
        model: the model as prepared for training; its parameters, gradients, RNG and mode are left as they were.
        batch: one packed row of at least two documents on the model's device (see `PackedCollator`).
        tolerance: largest leak allowed, in log-probability; None means exact zero, or rounding level for a mixture of
            experts, whose grouped products may change their order with other documents' routing. An operation that
            is seen to leak by itself fails in any case.

    Returns:
        The passed report.

    Raises:
        IsolationError: a document sees another one, a layer that has no kernel for packed rows refuses them, or the
            probe could not tell.
        PackingError: the batch does not state its boundaries; a tolerance that is none.
    """
    report = probe_isolation(model, batch, tolerance=tolerance)
    if not report.passed:
        raise isolation_error(report)
    return report


def probe_isolation(
    model: torch.nn.Module, batch: Mapping[str, Any], *, tolerance: float | None = None
) -> IsolationReport:
    """Measure both leaks; see `assert_isolation` for arguments. Costs two forward passes and one backward pass, in fp32
    two forward passes more (see placement.py), and one more to find the layer where a leak has no name.

    A compiled model is asked through its own Python code: compiled passes with and without gradients round in different
    ways, which is no leak, and tracing does not get through the operations' probe.
    """
    import torch

    bound = _tolerance(model, tolerance)
    documents = check_packed_batch(batch)
    index = _document_under_test(documents)
    document = documents[index]
    inputs = _probe_inputs(batch, documents)
    replaced = {**inputs, "input_ids": _replace_others(inputs["input_ids"], document, _vocabulary(model))}
    slots, device = int(inputs["input_ids"].shape[-1]), inputs["input_ids"].device

    with _probing(model), _same_randomness(device):
        probe = OperationProbe(model, document.start, document.stop, slots)
        with probe:
            own, others, before = _gradients(model, inputs, document)
    with _probing(model), _same_randomness(device), torch.no_grad():
        after = _log_probs(model, replaced)
    with _probing(model):
        moved = placement_change(model, inputs, documents, index, lambda row: _log_probs(model, row))
    difference = (after - before).abs()
    # log_probs[t] scores token t + 1: positions start .. stop - 2 belong to the document.
    inside = difference[0, document.start : document.stop - 1]
    outside = torch.cat((difference[0, : max(document.start - 1, 0)], difference[0, document.stop :]))
    output_change, others_change = _largest(inside), _largest(outside)
    alive = own > 0.0 and others_change > 0.0
    still = moved is None or moved <= placement_tolerance(device)
    apart = output_change <= bound and others <= bound
    if alive and not apart and not probe.leaks() and not _shares_layers():
        probe = OperationProbe(model, document.start, document.stop, slots, every_call=True)
        with _probing(model), _same_randomness(device), probe, torch.no_grad():
            _log_probs(model, inputs)
    leaks = probe.leaks()
    passed = alive and apart and not leaks and still
    return IsolationReport(
        passed=passed,
        documents=len(documents),
        probed_document=index,
        output_change=output_change,
        gradient_leak=others,
        own_gradient=own,
        others_change=others_change,
        tolerance=bound,
        leaks=leaks,
        operations=probe.operations(),
        placement_change=moved,
    )


def _document_under_test(documents: tuple[Document, ...]) -> int:
    """A document in the middle, so that a leak from either side shows, and as long as possible near it.

    Never the first: a causal model lets nothing reach it, whatever leaks behind it (rows of 40 + 24 tokens, case V04).
    """
    candidates = [i for i, document in enumerate(documents) if i and document.length > 1]
    if not candidates:
        raise IsolationError(
            f"isolation cannot be proven on a row of {len(documents)} document(s)",
            evidence=("the probe needs two documents in one row, the second or a later one longer than a token",),
            mend="pass a batch that holds at least two documents, the longer ones last",
        )
    middle = (len(documents) - 1) / 2
    return min(candidates, key=lambda i: (abs(i - middle), -documents[i].length))


def _probe_inputs(batch: Mapping[str, Any], documents: tuple[Document, ...]) -> dict[str, Any]:
    """The batch with every token but a document's first as a target, so that masked documents can be probed too."""
    inputs = {key: value for key, value in batch.items() if key not in ("token_counts", "num_items_in_batch")}
    labels = inputs["input_ids"].clone()
    for document in documents:
        labels[0, document.start] = IGNORE_INDEX
    inputs["labels"] = labels
    return inputs


def _replace_others(input_ids: torch.Tensor, document: Document, vocabulary: int) -> torch.Tensor:
    import torch

    if int(input_ids.max()) >= vocabulary:  # on a GPU a device-side assert, from which no later call recovers
        raise PackingError(
            f"the batch has token id {int(input_ids.max())}, and the model's embedding has {vocabulary} rows",
            mend="tokenize with the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))",
        )
    # Adding 1 changes every token and stays in the vocabulary; random tokens would need a generator and could repeat.
    replaced = torch.remainder(input_ids + 1, vocabulary)
    replaced[0, document.start : document.stop] = input_ids[0, document.start : document.stop]
    return replaced


def _vocabulary(model: torch.nn.Module) -> int:
    embedding = _unwrapped(model).get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside DistributedDataParallel or torch.compile."""
    while not hasattr(model, "get_input_embeddings"):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None:
            raise IsolationError(
                f"{type(model).__name__} has no input embeddings to probe",
                mend="pass the transformers model, or a wrapper that keeps it as `.module`",
            )
        model = inner
    return model


def _log_probs(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Score each next token, log p(token t + 1), float32 [1, T - 1]; by TRL's fused head where the model has it."""
    import torch

    if _has_fused_head(model):
        # The call TRL trains with; the fused head never builds [T, vocabulary] logits in one piece.
        fused: torch.Tensor = _called(model, {**inputs, "fused_lm_head": True}).log_probs
        return fused.float()
    labels = inputs["labels"]
    unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
    outputs = _called(model, unlabelled)
    if getattr(outputs, "logits", None) is None:
        raise IsolationError(
            f"{type(_unwrapped(model)).__name__} gives no logits to probe",
            mend="pass the language model with its output layer (AutoModelForCausalLM), as it trains",
        )
    logits = outputs.logits[:, :-1].float()
    targets = labels[:, 1:]
    picked = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(targets == IGNORE_INDEX, 0.0)


def _called(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The model's output; transformers' functions without kernels refuse packed rows, which is told as such."""
    try:
        return model(**inputs, use_cache=False)
    except ValueError as error:  # transformers 5.23, integrations/hub_kernels.py:1037
        if "packed sequences" not in str(error):
            raise
        raise IsolationError(
            "a layer cannot keep the documents of a packed row apart",
            evidence=(str(error),),
            mend=KERNELS_OR_PADDING,
            regardless="SpeedSFTTrainer puts slow references in its place, which take packed rows",
        ) from error


def _has_fused_head(model: torch.nn.Module) -> bool:
    """Whether TRL 1.16's `add_fused_lm_head` patched the forward (of the base model, under PEFT)."""
    inner = _unwrapped(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]
    # accelerate keeps the patched forward under this name when it wraps it in autocast.
    forward = getattr(base, "_original_forward", base.forward)
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def _gradients(
    model: torch.nn.Module, inputs: Mapping[str, Any], document: Document
) -> tuple[float, float, torch.Tensor]:
    """Largest gradient at the document's own embeddings, at all others, and the log-probabilities [1, T - 1]."""
    import torch

    captured: list[torch.Tensor] = []

    def capture(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        if captured:  # a checkpointed embedding would come by again in backward
            return output
        if not output.requires_grad:  # frozen embeddings (LoRA)
            output = output.detach().requires_grad_(True)
        captured.append(output)
        return output

    embedding = _unwrapped(model).get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(capture)
    # Without no_sync DistributedDataParallel would wait for gradients that never come.
    no_sync = getattr(model, "no_sync", nullcontext)
    try:
        with no_sync(), torch.enable_grad():
            log_probs = _log_probs(model, inputs)
            score = log_probs[0, document.start : document.stop - 1].sum()
            (gradient,) = torch.autograd.grad(score, captured[0])
    finally:
        handle.remove()
    size = gradient[0].abs().amax(dim=-1)
    own = _largest(size[document.start : document.stop])
    others = _largest(torch.cat((size[: document.start], size[document.stop :])))
    return own, others, log_probs.detach()


def _largest(values: torch.Tensor) -> float:
    """The largest value; NaN counts as infinite, so that it can pass no bound."""
    import torch

    if values.numel() == 0:
        return 0.0
    return float(torch.nan_to_num(values.float(), nan=float("inf")).max())


def _shares_layers() -> bool:
    """Whether other ranks may have to take part in a forward pass, who saw no leak and make none."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _tolerance(model: torch.nn.Module, given: float | None) -> float:
    if given is not None:
        if not (isinstance(given, (int, float)) and given >= 0):  # NaN is not, either
            raise PackingError(
                f"tolerance={given!r} is no change of a log-probability",
                mend="pass a number from 0 up, or None: exact zero where that can be asked for",
            )
        return float(given)
    config: Any = getattr(_unwrapped(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return 0.0
    import torch

    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    # A log-probability is of order 10; a grouped product in another order moves it by some units in the last place.
    return 160.0 * torch.finfo(dtype).eps


@contextmanager
def _probing(model: torch.nn.Module) -> Iterator[None]:
    """Slow decays, and torch.compile set aside where it is used at all: merely asking for it imports the compiler."""
    import torch

    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), _slow_decay(model):
        yield


@contextmanager
def _slow_decay(model: torch.nn.Module) -> Iterator[None]:
    """Let every recurrent state remember, so that a leak cannot fade below rounding; restored on exit."""
    import torch

    decays = [parameter for name, parameter in model.named_parameters() if name.rsplit(".", 1)[-1] == "A_log"]
    saved = [parameter.detach().clone() for parameter in decays]
    try:
        with torch.no_grad():
            for parameter in decays:
                parameter.fill_(_SLOW_DECAY_A_LOG)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(decays, saved, strict=True):
                parameter.copy_(value)


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """The same dropout masks in both passes, and the caller's random state untouched."""
    import torch

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield
