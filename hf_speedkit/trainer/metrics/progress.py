"""A progress bar whose log lines fit the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

# What a person watches, in this order; trackers and the step log get everything.
_SHOWN: tuple[tuple[str, str], ...] = (
    ("loss", "loss {:.3f}"),
    ("eval_loss", "eval loss {:.3f}"),
    ("grad_norm", "grad norm {:.2f}"),
    ("learning_rate", "lr {:.1e}"),
    ("speed/real_tokens_per_second", "{:,.0f} real tokens/s"),
    ("speed/mfu", "MFU {:.1f} %"),
    ("speed/step_time_s", "step {:.2f} s"),
    ("speed/gpu_utilization", "GPU utilisation {:.0f} %"),
)
# Of an evaluation, whatever its set is called: how long it took, and what TRL 1.16 adds by itself.
_UNSHOWN_OF_EVAL = ("runtime", "_per_second", "_time", "_entropy", "_mean_token_accuracy", "_num_tokens")


class CompactProgress(ProgressCallback):  # type: ignore[misc]
    """transformers' progress bar, with one short line per log instead of a dictionary of thirty numbers."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Write the line above the bar, on world rank 0."""
        if not state.is_world_process_zero or self.training_bar is None:
            return
        line = compact_line(logs or {})
        if line:
            self.training_bar.write(f"step {state.global_step:>{len(str(state.max_steps))}}: {line}")


def compact_line(logs: Mapping[str, Any]) -> str:
    """The numbers a person watches; empty where a log has none of them."""
    parts = [shown.format(logs[key]) for key, shown in _SHOWN if isinstance(logs.get(key), (int, float))]
    own = {key for key, _ in _SHOWN}
    for key, value in logs.items():  # of sets with names (eval_NAME_loss), and of a compute_metrics
        if (
            key.startswith("eval_")
            and key not in own
            and not key.endswith(_UNSHOWN_OF_EVAL)
            and isinstance(value, (int, float))
        ):
            parts.append(f"{key.replace('_', ' ', 1)} {value:.3f}")
    return ", ".join(parts)
