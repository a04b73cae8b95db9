"""Environment and visible GPUs, with a fake NVML and without any."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from fake_nvml import FakeNvml

from hf_speedkit.core.records import to_json
from hf_speedkit.measure.environment import GpuInfo, collect_environment, visible_gpus

TWO = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_described_by_nvml():
    assert visible_gpus(nvml=FakeNvml(TWO)) == (
        GpuInfo(name=TWO[0], memory_gib=1.0, compute_capability=(9, 0)),
        GpuInfo(name=TWO[1], memory_gib=2.0, compute_capability=(9, 0)),
    )


@pytest.mark.parametrize(
    ("visible", "memory_gib"),
    [
        ("0", [1.0]),
        ("1,0", [2.0, 1.0]),
        (" 1 , 0 ", [2.0, 1.0]),
        ("", []),
        ("-1", []),
        ("1,7,0", [2.0]),  # CUDA stops at the first entry that names no device
        ("GPU-00000001-aaaa", [2.0]),
        ("GPU-00000001", [2.0]),
        ("GPU-0000", []),  # more than one device starts with it
        ("MIG-unknown", []),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices_is_honoured(monkeypatch, visible, memory_gib):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.memory_gib for gpu in visible_gpus(nvml=FakeNvml(TWO))] == memory_gib


def test_without_nvml_there_are_no_gpus_and_no_driver():
    broken = FakeNvml(broken="Driver Not Loaded")
    assert visible_gpus(nvml=broken) == ()
    environment = collect_environment(nvml=broken)
    assert environment.devices == ()
    assert environment.driver is None


def test_an_nvml_that_fails_half_way_is_not_half_reported_and_is_given_back():
    nvml = FakeNvml(TWO, unsupported=["memory"])
    environment = collect_environment(nvml=nvml)
    assert (environment.driver, environment.devices) == (None, ())
    assert nvml.users == 0


def test_an_old_card_without_a_capability_is_still_described():
    (gpu,) = visible_gpus(nvml=FakeNvml(["NVIDIA H200"], unsupported=["capability"]))
    assert gpu.compute_capability is None


def test_environment_names_versions_devices_and_driver():
    environment = collect_environment(nvml=FakeNvml(TWO))
    assert environment.devices == tuple(TWO)
    assert environment.driver == "580.65.06"
    assert environment.packages["torch"] == metadata.version("torch")
    assert "not-a-package" not in environment.packages
    assert environment.python == ".".join(map(str, sys.version_info[:3]))
    assert environment.cpu_count >= 1


def test_environment_holds_no_secret_user_host_or_path(monkeypatch):
    planted = {
        "HF_TOKEN": "hf_planted_token",
        "WANDB_API_KEY": "planted-key",
        "USER": "planted-user",
        "HOSTNAME": "planted-host",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    line = to_json(collect_environment(nvml=FakeNvml(TWO)))
    assert not [value for value in planted.values() if value in line]
    assert "/" not in line
    assert "\\" not in line
    json.loads(line)


def test_a_checkout_has_a_commit_and_an_installed_package_has_none(tmp_path, monkeypatch):
    from hf_speedkit.measure import environment as module

    package = tmp_path / "checkout" / "hf_speedkit" / "measure" / "environment.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(module, "__file__", str(package))
    assert collect_environment(nvml=FakeNvml()).commit is None

    root = package.parents[2]
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert collect_environment(nvml=FakeNvml()).commit is None  # no commit yet
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    clean = collect_environment(nvml=FakeNvml()).commit
    assert len(clean) == 40
    package.write_text("changed")
    assert collect_environment(nvml=FakeNvml()).commit == f"{clean}+"


def test_looking_for_gpus_is_fast_and_imports_no_torch():
    # 0.3 s is what the recipe's "no GPU" check may cost, in CPU time: other tests share the machine.
    program = (
        "import time, sys; began = time.process_time();"
        "from hf_speedkit.measure.environment import collect_environment, visible_gpus; visible_gpus();"
        "took = time.process_time() - began; collect_environment();"
        "print(took, 'torch' in sys.modules)"
    )
    best = min(
        (subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(3)),
        key=lambda done: float(done.stdout.split()[0]),
    )
    took, torch_imported = best.stdout.split()
    assert float(took) < 0.3
    assert torch_imported == "False"
