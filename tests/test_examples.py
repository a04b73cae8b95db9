"""Every example runs on a CPU and says what it promises."""

import difflib
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from hf_speedkit.core.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "existing_trainer": "of what was computed is padding",
    "sft_before": "'num_tokens'",
    "sft_after": "'speed/total_real_tokens'",
    "completion_only": "isolated: True",
    "tool_calls": "of real tokens are targets",
    "lora": "isolated: True",
    "strangers_trace": "aten::",
}
NOT_ALONE = {"tiny", "regression_gate"}  # what the others share, and the one that takes arguments


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def running(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return running


def test_no_example_goes_untried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS) | NOT_ALONE


# peft 0.21 asks transformers by the older name of a property.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", SAYS)
def test_each_example_runs(run, name):
    if name == "lora" and importlib.util.find_spec("peft") is None:
        with pytest.raises(ConfigurationError, match='pip install "peft>='):
            run(name)
        return
    assert SAYS[name] in run(name)
    if name == "completion_only":  # a second time too: a run is not written over
        assert SAYS[name] in run(name)


def test_two_lines_lead_from_trl_to_hf_speedkit():
    before, after = ((EXAMPLES / f"sft_{when}.py").read_text().splitlines() for when in ("before", "after"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert [line[0] for line in changed] == ["-", "+"] * 2


def step_log(path, *, step_time_s, real):
    """Four steps of one rank, and the window that holds their rates."""
    tokens = {"slots": 1000, "real": real, "target": real, "documents": 4}
    lines = [{"kind": "session", "format": 1, "step": 0, "environment": {"python": "3.11", "packages": {}}}]
    lines += [
        {"kind": "step", "step": step, "micro_batches": 1, "tokens": tokens, "step_time_s": step_time_s}
        for step in range(1, 5)
    ]
    metrics = {
        "speed/real_tokens_per_second": real / step_time_s, "speed/step_time_s": step_time_s, "speed/steady_steps": 4,
        "speed/total_slots": 4000, "speed/total_real_tokens": 4 * real,
    }  # fmt: skip
    lines.append({"kind": "window", "step": 4, "metrics": metrics})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        ({"step_time_s": 1.05, "real": 990}, 0, "as fast as before"),
        ({"step_time_s": 1.20, "real": 990}, 1, "real tokens/s fell from 990 to 825"),
        ({"step_time_s": 0.50, "real": 900}, 1, "rows are 90.0% full; they were 99.0%"),
    ],
)
def test_the_gate_fails_where_a_run_is_worse(run, tmp_path, capsys, new, code, said):
    base = step_log(tmp_path / "base.jsonl", step_time_s=1.0, real=990)
    with pytest.raises(SystemExit) as stopped:
        run("regression_gate", base, step_log(tmp_path / "new.jsonl", **new))
    assert stopped.value.code == code
    assert said in capsys.readouterr().out
