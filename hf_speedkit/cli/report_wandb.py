"""The side-by-side view in Weights & Biases: speed beside utilisation, on one x-axis, saved as a workspace.

wandb puts its own system metrics on an axis of time and ours on one of steps, so the two never meet in one panel. The
keys of `hf_speedkit.core.metrics` hold utilisation in the same row as tokens per second; this lays them out.
"""

from __future__ import annotations

import re
from typing import Any

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.core.step_parts import PARTS

X = "train/global_step"

SECTIONS: tuple[tuple[str, tuple[tuple[str, tuple[str, ...], bool], ...]], ...] = (
    (
        "hf_speedkit: speed beside utilisation",
        (
            ("Tokens per second", ("real_tokens_per_second", "slots_per_second"), False),
            ("GPU utilisation, % (says that a kernel ran, not how well)", ("gpu_utilization",), True),
            ("FLOP utilisation, % of peak", ("mfu", "hfu", "ofu"), True),
        ),
    ),
    (
        "hf_speedkit: where a step's time goes",
        (
            ("Step, s", ("step_time_s", "device_time_s", "host_time_s", "data_wait_s"), False),
            (
                "Parts of the counted step, s",
                tuple(f"part_{name}_s" for name in PARTS),
                False,
            ),
            ("Launches of the counted step", ("launches", "launch_calls"), False),
        ),
    ),
    (
        "hf_speedkit: tokens and health",
        (
            ("Slots that hold a token, tokens that are targets", ("packing_efficiency", "target_share"), False),
            ("Steps with NaN, kernels compiled", ("nonfinite_steps", "compiled_kernels"), False),
            ("GPU memory, GiB", ("gpu_memory_gib",), False),
        ),
    ),
)
"""Section, then panel: title, keys without their prefix, whether it is a percentage on a fixed axis."""


def split_target(target: str) -> tuple[str, str]:
    """ENTITY/PROJECT apart.

    Raises:
        ConfigurationError: it is not of that form.
    """
    match = re.fullmatch(r"([\w.-]+)/([\w.-]+)", target)
    if match is None:
        raise ConfigurationError(f"{target!r} is not ENTITY/PROJECT", mend="--wandb my-team/my-project")
    return match.group(1), match.group(2)


def save_view(target: str) -> str:
    """Save the view into a project and return its address.

    Args:
        target: ENTITY/PROJECT; its runs are those that `report_to="wandb"` logged.

    Raises:
        ConfigurationError: a target of another form, no package, no key, or offline mode.
        SpeedkitError: wandb refused.
    """
    entity, project = split_target(target)
    workspaces, reports = _packages()
    _require_a_connection()
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name="hf_speedkit",
        sections=[
            workspaces.Section(name=name, panels=[_panel(reports, *panel) for panel in panels], is_open=True)
            for name, panels in SECTIONS
        ],
    )
    try:
        saved = workspace.save()
    except Exception as error:
        raise SpeedkitError(
            f"wandb did not save the view in {target}",
            evidence=((str(error).strip().splitlines() or [type(error).__name__])[0],),
            mend="check ENTITY/PROJECT, the key (wandb login) and the network; the page is written all the same",
        ) from error
    return str(getattr(saved, "url", None) or getattr(workspace, "url", target))


def _panel(reports: Any, title: str, keys: tuple[str, ...], percentage: bool) -> Any:
    axis = {"range_y": (0, 100)} if percentage else {}
    return reports.LinePlot(title=title, x=X, y=[f"train/speed/{key}" for key in keys], **axis)


def _packages() -> tuple[Any, Any]:
    from hf_speedkit.trainer.installed_versions import too_old

    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        lacks: str | None = "is not installed"
    else:
        lacks = too_old("wandb-workspaces")
    if lacks is not None:
        raise ConfigurationError(
            f"--wandb saves a view with the package wandb-workspaces, which {lacks}",
            mend='pip install "hf-speedkit[workspaces]"',
            regardless="leave --wandb out: the page needs no network",
        )
    return workspaces, reports


def _require_a_connection() -> None:
    from hf_speedkit.trainer.trackers import WITHOUT_SERVER, require_tracker_names, wandb_mode, wandb_problem

    require_tracker_names("wandb")
    problem = wandb_problem()
    if problem is not None:
        raise ConfigurationError(f"wandb cannot start: {problem[0]}", evidence=problem[1:], mend="wandb login")
    mode = wandb_mode()
    if mode in WITHOUT_SERVER:
        raise ConfigurationError(
            f"--wandb needs wandb's server, and its mode is {mode} (WANDB_MODE, or `wandb offline` in this folder)",
            mend="wandb sync the runs where there is a network, then run this with WANDB_MODE unset",
            regardless="leave --wandb out: the page needs no network",
        )
