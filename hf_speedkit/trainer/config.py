"""`SpeedSFTConfig`: TRL's SFTConfig with packing, proof and metrics on by default."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Self

from trl import SFTConfig

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.kernels.lora_forward import LORA
from hf_speedkit.trainer.config_rules import (
    ASSERTIONS,
    EXPORTS,
    OVERLONG,
    STRATEGIES,
    TRL_STRATEGIES,
    VERIFICATIONS,
    check_choices,
    check_given,
    refuse_without_packing,
    say_what_is_idle,
    settle_batches,
    settle_packing,
)
from hf_speedkit.trainer.installed_versions import old_versions_told
from hf_speedkit.trainer.launching import (
    refuse_lost_fp8,
    refuse_optimizer,
    take_launchers_compilation,
    take_launchers_precision,
    warn_of_first_fsdp,
)
from hf_speedkit.trainer.precision_rules import check_precision
from hf_speedkit.trainer.setting_names import refuse_unknown_settings


@dataclass
class SpeedSFTConfig(SFTConfig):  # type: ignore[misc]
    """Settings of `SpeedSFTTrainer`: every SFTConfig setting, and these.

    Args:
        packing: pack documents into rows of one fixed shape (on by default here).
        packing_strategy: "auto" (the fuller of the next two), "fifo_close", "best_fit_decreasing" or "next_fit".
        tokens_per_batch: slots of one micro-batch on one device, a single row [1, tokens_per_batch]. None means
            max_length x per_device_train_batch_size, which is what TRL would have computed.
        cost_window_steps: steps whose rows are sorted by cost together, so that rows of like cost run at the same time
            on all ranks. 1 sorts inside each optimizer step, which changes no step's documents; 8 moves documents
            between neighbouring steps and pays for long rows without accumulation. The log says what either is
            predicted to save. None means 1.
        overlong: what to do with documents longer than a row: "error", "split", "truncate" or "drop". Whatever is
            cut or dropped is counted in the summary.
        chat_template_kwargs: passed to the chat template of every conversation, for example
            {"enable_thinking": False}, without which Qwen3.8's template writes a line on reasoning effort into each.
        template_check: look at 100 conversations as they are rendered for training and for inference: "strict"
            refuses a line on reasoning effort that was not asked for, tool calls filled up with null, messages and
            tools that the template leaves out, questions among the targets of `assistant_only_loss`, and completions
            whose prompt is rendered or tokenized in another way; "warn" says so; "off" looks at nothing.
        exclude_generation_prompt: tokens that the prompt supplies at inference (an empty reasoning block, for
            example) are no targets. Renders and tokenizes every conversation once more.
        kernel_assertion: "strict" refuses to train on a slow or unproven kernel, "warn" says so, "off" looks at
            nothing; "auto" is strict on a GPU and a report on a CPU.
        packed_attention: "auto" lets packed rows run on torch's variable-length attention where the model would use
            sdpa or eager with a [T, T] mask and the kernel can do what the model needs; "keep" leaves it alone.
        fused_layers: on a GPU, run norms, SwiGLU and the convolution on fused kernels from fla or Liger where those are
            installed and agree with the layer's own forward, in outputs and gradients; and give GatedDeltaNet layers
            a forward that copies nothing for its kernel, and attention layers one that normalises and rotates their
            heads in one kernel, where it agrees in the same way.
        fused_layers_exclude: names to leave alone: "convolution", "split_convolution", "rms_norm", "gated_norm",
            "swiglu", "qk_rotary", "lora".
        fused_lora: on a GPU, run peft's LoRA layers (one adapter, no dropout, weights not quantized) without copies in
            fp32, where that agrees with peft's own forward; products take adapters rounded to the activations' dtype,
            as under bf16 autocast.
        loss_head: "auto" computes the loss of packed rows from hidden states in one go, without host reads and without
            projecting twice, where the model's output layer is a plain one; "trl" leaves TRL's head in place.
        fused_optimizer: torch's fused AdamW (optim="adamw_torch_fused") runs as one kernel a tensor that also clips.
            The gradients themselves are then not clipped: a callback that reads them sees them as they came.
        activation_checkpointing_layers: how many layers are checkpointed where activation_checkpointing is on. "auto"
            starts with all of them, measures the first two steps and leaves as many alone as memory allows (packed
            rows on a GPU; all of them elsewhere), "all", or a number.
        activation_checkpointing_keep: "products" keeps the outputs of matrix products of checkpointed layers, of as
            many layers as memory allows (with activation_checkpointing_layers="auto"; of all otherwise), so that only
            what lies between the products is computed again; "nothing" keeps nothing; "auto" is "products" where
            memory is measured, and "nothing" elsewhere. Under autocast and with reentrant checkpointing it changes
            nothing.
        activation_offloading_layers: how many of the checkpointed layers keep their activations in host memory
            instead of computing them twice: "none", a number, or "auto", which tries as many as copies have time for
            beside the computation, where layers are still checkpointed on a GPU, and goes back if a step did not get
            faster. TRL's `activation_offloading`, which moves what every layer saves, leaves this out.
        memory_check: before a model given by its name is loaded, plan the memory of a step from its configuration and
            these settings: "strict" refuses what cannot fit and names what would, "warn" says so, "off" plans nothing.
        isolation_check: prove before step 1 that packed documents do not see one another.
        throughput: log tokens per second and the parts of a step through `Trainer.log`.
        peak_tflops: dense peak of one device in TFLOP/s for MFU; None: from the table in `hf_speedkit.core.devices`.
        count_launches_every: on a GPU, count the launches and device time of one step in so many; 0: never.
        nonfinite: "strict" ends training at the logging step after a NaN or infinite loss or gradient (not with fp16,
            whose scaler skips such steps); "warn" counts and names them.
        trace_steps: optimizer steps to trace with torch.profiler, for example [20]; read the files with
            `hf-speedkit trace FILE`.
        step_log: also write one JSON line a step to `output_dir/speedkit_steps.jsonl`.
        allow_existing_output: train into an output_dir that already holds a run.
        stuck_rank_timeout_s: seconds in which no rank goes on, after which the run ends and the missing rank is named;
            0 leaves it to `ddp_timeout` (1,800 s), which names nobody. See docs/fsdp2.md.
        fsdp_prefetch_layers: layers that FSDP2 gathers ahead; None leaves torch's own choice, one, as reentrant
            checkpointing does.
        fsdp_zero_copy: FSDP2 gathers weights into the parameters and reduces gradients from where they are, instead of
            through flat copies of both; proven before step 1, and left out where torch or a group's sharding does not
            allow it.
        checkpoint_verification: what `resume_from_checkpoint` compares before it loads anything: "checksums" reads
            every byte, shared by all ranks, "sizes" only looks at the files.
        export_dtype: type of the weights that `save_model` writes: "auto" (bf16 where training computes in bf16, else
            as stored), "stored", "bfloat16", "float16" or "float32". Checkpoints always keep what they need.
        stop_signals: signals on which all ranks write a checkpoint at the next common step and training ends; an empty
            list for none. Without checkpoints (save_strategy="no") signals are left alone.

    These SFTConfig defaults differ: `packing` is on, `logging_nan_inf_filter` is off (it shows a non-finite loss as 0),
    `per_device_eval_batch_size` is 1 (one row a forward), and `per_device_train_batch_size` becomes 1: a micro-batch is
    one row, and its size is `tokens_per_batch`. `max_length` becomes None: documents are limited by the row.

    Raises:
        ConfigurationError: settings that cannot work, with the one to change.
    """

    packing: bool = field(default=True, metadata={"help": "Pack documents into rows of one fixed shape."})
    packing_strategy: str = field(
        default="auto",
        metadata={
            "help": f"How documents are put together: {', '.join(STRATEGIES)} (TRL's bfd, bfd_split are understood).",
            "choices": [*STRATEGIES, *TRL_STRATEGIES, "wrapped"],
        },
    )
    tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Slots of one micro-batch. Default: max_length x per_device_train_batch_size."},
    )
    cost_window_steps: int | None = field(
        default=None, metadata={"help": "Steps whose rows are sorted by cost together. Default: 1; the log advises."}
    )
    overlong: str = field(
        default="error",
        metadata={"help": "Documents longer than a row: error, split, truncate or drop.", "choices": list(OVERLONG)},
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Passed to the chat template of every conversation."},
    )
    template_check: str = field(
        default="strict",
        metadata={"help": "Chat templates: strict, warn or off.", "choices": ["strict", "warn", "off"]},
    )
    exclude_generation_prompt: bool = field(
        default=False, metadata={"help": "Tokens that the prompt supplies at inference are no targets."}
    )
    kernel_assertion: str = field(
        default="auto",
        metadata={
            "help": "strict, warn, off; auto is strict on a GPU and a report on a CPU.",
            "choices": list(ASSERTIONS),
        },
    )
    packed_attention: str = field(
        default="auto",
        metadata={
            "help": "auto: torch's variable-length attention for packed rows where possible; keep: leave it alone.",
            "choices": ["auto", "keep"],
        },
    )
    fused_layers: bool = field(
        default=True,
        metadata={"help": "Run small layers on fused kernels (fla's, Liger's, ours) where they are proven."},
    )
    fused_layers_exclude: list[str] | None = field(
        default=None,
        metadata={
            "help": "Parts left alone: convolution, split_convolution, rms_norm, gated_norm, swiglu, qk_rotary, lora."
        },
    )
    fused_lora: bool = field(default=True, metadata={"help": "Run LoRA without copies in fp32, where it is proven."})
    loss_head: str = field(
        default="auto",
        metadata={"help": "auto: our loss head where it can serve; trl: TRL's.", "choices": ["auto", "trl"]},
    )
    fused_optimizer: bool = field(default=True, metadata={"help": "Clip and update in one kernel a tensor."})
    activation_checkpointing_layers: str = field(
        default="auto", metadata={"help": "Layers to checkpoint: auto (as few as memory asks for), all, or a number."}
    )
    activation_checkpointing_keep: str = field(
        default="auto",
        metadata={
            "help": "What checkpointed layers keep: nothing, or the outputs of their products as memory allows (auto).",
            "choices": ["auto", "nothing", "products"],
        },
    )
    activation_offloading_layers: str = field(
        default="none",
        metadata={"help": "Checkpointed layers whose activations go to host memory instead: none, auto, or a number."},
    )
    memory_check: str = field(
        default="strict",
        metadata={
            "help": "A model given by name that cannot fit into the GPUs: strict refuses it, warn, off.",
            "choices": ["strict", "warn", "off"],
        },
    )
    isolation_check: bool = field(
        default=True,
        metadata={"help": "Prove before step 1 that packed documents do not see one another."},
    )
    throughput: bool = field(default=True, metadata={"help": "Log tokens per second and the parts of a step."})
    peak_tflops: float | None = field(
        default=None, metadata={"help": "Dense peak of one device in TFLOP/s, for MFU. Default: by its name."}
    )
    count_launches_every: int = field(
        default=100, metadata={"help": "On a GPU, count launches and device time of one step in so many; 0: never."}
    )
    nonfinite: str = field(
        default="strict",
        metadata={"help": "After a NaN or infinite loss or gradient: strict ends training, warn goes on."},
    )
    trace_steps: list[int] | None = field(
        default=None, metadata={"help": "Optimizer steps to trace; read the files with hf-speedkit trace."}
    )
    step_log: bool = field(default=True, metadata={"help": "Write one JSON line a step into output_dir."})
    allow_existing_output: bool = field(
        default=False, metadata={"help": "Train into an output_dir that already holds a run."}
    )
    stuck_rank_timeout_s: float = field(
        default=600.0,
        metadata={"help": "Seconds without progress after which the run ends, the missing rank named."},
    )
    fsdp_prefetch_layers: int | None = field(
        default=None, metadata={"help": "Layers that FSDP2 gathers ahead. Default: torch's own, 1."}
    )
    fsdp_zero_copy: bool = field(
        default=True, metadata={"help": "FSDP2's collectives without flat copies of weights and gradients."}
    )
    checkpoint_verification: str = field(
        default="checksums",
        metadata={"help": "Before a resume: checksums or sizes.", "choices": list(VERIFICATIONS)},
    )
    export_dtype: str = field(
        default="auto",
        metadata={"help": f"Weights that save_model writes: {', '.join(EXPORTS)}.", "choices": list(EXPORTS)},
    )
    stop_signals: list[str] = field(
        default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGHUP"],
        metadata={"help": "Signals on which a checkpoint is written and training ends."},
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Replace non-finite losses in the log. Off: they are shown as they are."}
    )
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Packed rows per evaluation forward pass."})

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "chat_template_kwargs"]  # noqa: RUF012

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Name settings that there are not, before Python calls them unexpected keyword arguments."""
        if vars(cls).get("__dataclass_fields__"):  # a subclass with an __init__ of its own takes what it likes
            refuse_unknown_settings(given, (f.name for f in fields(cls) if f.init))
        made: Self = super().__new__(cls)
        return made

    @old_versions_told()  # with transformers 5.17 an AttributeError, where this module is imported by itself
    def __post_init__(self) -> None:
        """Check the settings and settle the shape of a micro-batch."""
        # TRL's own default is given under the old name, and transformers 5.23 warns about it at every start.
        for new in ("activation_checkpointing", "activation_checkpointing_kwargs"):
            if getattr(self, new) is None:
                setattr(self, new, getattr(self, new.replace("activation", "gradient")))
        # On the command line `--fsdp false` is text, which transformers 5.23 takes for the name of a strategy.
        settings: Any = self
        if isinstance(settings.fsdp, str) and settings.fsdp.lower() in ("true", "false"):
            settings.fsdp = settings.fsdp.lower() == "true"
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION")
        check_given(self)
        super().__post_init__()
        refuse_lost_fp8(asked, self.mixed_precision)
        take_launchers_precision(self)
        take_launchers_compilation(self)
        check_precision(self)
        fsdp_version = 0 if self.use_cpu else (self.fsdp_plugin_args or {}).get("fsdp_version")
        refuse_optimizer(self.optim, fsdp_version)
        warn_of_first_fsdp(fsdp_version)
        # `stop_signals` does what that is for, at one step on all ranks (see trainer/ranks/stop_signal.py).
        self.enable_jit_checkpoint = False
        check_choices(self)
        settle_batches(self)
        say_what_is_idle(self)
        if self.packing:
            settle_packing(self)
        else:
            refuse_without_packing(self)

    @property
    def row_slots(self) -> int:
        """Slots of a packed row, settled."""
        assert self.tokens_per_batch is not None, "set in __post_init__ when packing is on"
        return self.tokens_per_batch

    @property
    def unfused_layers(self) -> tuple[str, ...]:
        """Parts that `fused_layers` is to leave alone."""
        return (*(self.fused_layers_exclude or ()), *(() if self.fused_lora else (LORA,)))

    def epochs(self, tokens: int) -> int:
        """Epochs that a run on `tokens` real tokens will see; a sampler must know them to keep their length equal."""
        settings: Any = self
        if settings.max_steps <= 0:
            return max(1, math.ceil(float(settings.num_train_epochs)))
        # No epoch is shorter than its tokens' share of a step's slots.
        slots = self.row_slots * int(settings.world_size) * int(settings.gradient_accumulation_steps)
        return max(1, math.ceil(int(settings.max_steps) / max(1, math.ceil(tokens / slots))))

    @classmethod
    def from_sft_config(cls, args: SFTConfig) -> SpeedSFTConfig:
        """The same settings with this class's additions at their defaults.

        `packing` stays as `args` has it: a config made for SFTTrainer says what its user wants.
        """
        values = {f.name: getattr(args, f.name) for f in fields(args) if f.init}
        values["hub_token"] = args.hub_token
        values["per_device_eval_batch_size"] = 1 if args.packing else args.per_device_eval_batch_size
        return cls(**values)


def settled_config(args: SFTConfig | None, model: Any) -> SpeedSFTConfig:
    """The settings a trainer runs with: a SpeedSFTConfig as it is, an SFTConfig taken over, or the defaults.

    Args:
        args: what the user passed.
        model: a model or the name of one, for the default output_dir.

    Raises:
        ConfigurationError: something that is no SFTConfig.
    """
    if args is None:
        name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", "") or "model")
        return SpeedSFTConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-SFT")
    if isinstance(args, SpeedSFTConfig):
        return args
    if isinstance(args, SFTConfig):
        return SpeedSFTConfig.from_sft_config(args)
    raise ConfigurationError(
        f"args is a {type(args).__name__}", mend="pass a hf_speedkit.SpeedSFTConfig (or TRL's SFTConfig)"
    )
