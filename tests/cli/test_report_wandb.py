"""`hf-speedkit report --wandb`: the view, and clear words where it cannot be saved. wandb-workspaces is a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import step_logs as logs
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.cli.report_wandb import SECTIONS
from hf_speedkit.core.metrics import METRICS

ADDRESS = "https://wandb.ai/team/project?nw=view"


class FakeWorkspaces:
    """The parts of wandb-workspaces 0.4.13 that are used."""

    def __init__(self, error=None):
        self.saved = []
        self.error = error

    def modules(self):
        package, reports = ModuleType("wandb_workspaces"), ModuleType("wandb_workspaces.reports")
        v2, workspaces = ModuleType("wandb_workspaces.reports.v2"), ModuleType("wandb_workspaces.workspaces")
        v2.LinePlot = lambda **settings: SimpleNamespace(**settings)
        workspaces.Section = lambda **settings: SimpleNamespace(**settings)
        workspaces.Workspace = self.workspace
        package.reports, package.workspaces, reports.v2 = reports, workspaces, v2
        return {module.__name__: module for module in (package, reports, v2, workspaces)}

    def workspace(self, **settings):
        made = SimpleNamespace(**settings, url=ADDRESS)

        def save():
            if self.error:
                raise self.error
            self.saved.append(made)
            return made

        made.save = save
        return made


@pytest.fixture
def run_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = logs.write(tmp_path / "first", logs.run(10))

    def run(*options, fake=None):
        for name in [name for name in sys.modules if name.partition(".")[0] == "wandb_workspaces"]:
            monkeypatch.delitem(sys.modules, name)
        if fake is None:
            monkeypatch.setitem(sys.modules, "wandb_workspaces", None)  # as if it were not installed
        else:
            for name, module in fake.modules().items():
                monkeypatch.setitem(sys.modules, name, module)
        return CliRunner().invoke(app, ["report", str(folder), *options])

    return run


def test_the_view_puts_speed_beside_utilisation_on_the_global_step(run_report):
    fake = FakeWorkspaces()
    done = run_report("--wandb", "team/project", fake=fake)
    assert done.exit_code == 0, done.output
    assert ADDRESS in done.output
    (view,) = fake.saved
    assert (view.entity, view.project) == ("team", "project")
    panels = view.sections[0].panels
    assert panels[0].y[0] == "train/speed/real_tokens_per_second"
    assert panels[1].y == ["train/speed/gpu_utilization"]
    assert panels[1].range_y == (0, 100)
    assert {panel.x for section in view.sections for panel in section.panels} == {"train/global_step"}


def test_every_key_of_the_view_is_one_that_is_logged():
    keys = {f"speed/{key}" for _, panels in SECTIONS for _, names, _ in panels for key in names}
    assert keys <= set(METRICS)


@pytest.mark.parametrize(
    ("environment", "fake", "says"),
    [
        ({}, None, 'pip install "hf-speedkit[workspaces]"'),
        ({"WANDB_MODE": "offline"}, FakeWorkspaces(), "its mode is offline"),
        ({"WANDB_API_KEY": "", "HOME": "/nowhere"}, FakeWorkspaces(), "wandb login"),
        ({}, FakeWorkspaces(error=RuntimeError("no such project\nmore")), "no such project"),
    ],
    ids=["no package", "offline", "no key", "refused"],
)
def test_what_keeps_the_view_from_being_saved_is_said_and_the_page_is_there(
    run_report, tmp_path, monkeypatch, environment, fake, says
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = run_report("--wandb", "team/project", fake=fake)
    assert done.exit_code == 1
    assert says in done.output
    assert (tmp_path / "speedkit_report.html").is_file()


def test_a_target_of_another_form_is_wrong_use(run_report, tmp_path):
    done = run_report("--wandb", "project", fake=FakeWorkspaces())
    assert done.exit_code == 2
    assert not (tmp_path / "speedkit_report.html").exists()
