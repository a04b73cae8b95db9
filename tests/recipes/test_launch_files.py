"""The launch files: what they would run, found out without a cluster by programs of the same name that only print."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import qwen27b_sft as recipe
import yaml

from hf_speedkit.trainer.launching import announce_sharding

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
REAL = ROOT / "recipes" / "qwen27b_sft.yaml"
# Prints its name and arguments as one JSON line; srun also runs them, once a node, as Slurm does.
PRINTER = """#!/usr/bin/env python3
import json, sys
print(json.dumps([sys.argv[0].rsplit("/", 1)[-1], *sys.argv[1:]]))
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@"; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2 $3" = "show hostnames gpu[07-08]" ] && printf 'gpu07\\ngpu08\\n'
"""


@pytest.fixture
def run(tmp_path):
    for name, text in {"torchrun": PRINTER, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(script, *arguments, **environment):
        ended = subprocess.run(
            ["bash", str(LAUNCH / script), *arguments], capture_output=True, text=True, timeout=30, cwd=ROOT,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return run


def torchrun_parts(command):
    """The launcher's own options and the job's, of `torchrun --name value ... script --name value ...`."""
    assert command[0] == "torchrun"
    script = command.index("recipes/qwen27b_sft.py")
    options = command[1:script]
    return dict(zip(options[::2], options[1::2], strict=True)), command[script + 1 :]


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch", "kubernetes.yaml"])
def test_ranks_have_minutes_to_save_after_sigterm(name):
    # torchrun kills after 30 s by default, in the middle of a checkpoint
    text = (LAUNCH / name).read_text()
    seconds = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT.*?(\d{3})", text, re.DOTALL)
    assert seconds
    assert int(seconds.group(1)) < 300  # what Slurm and Kubernetes wait


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_good_bash(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True, timeout=30)


def test_torchrun_on_one_machine(run):
    [command] = run("torchrun.sh", "--run_name", "a b", GPUS="4")
    launcher, job = torchrun_parts(command)
    assert launcher == {
        "--nnodes": "1", "--nproc_per_node": "4", "--node_rank": "0", "--master_addr": "127.0.0.1",
        "--master_port": "29500",
    }  # fmt: skip
    assert job == ["--run_name", "a b"]


def test_torchrun_on_the_second_of_two_machines(run):
    [command] = run("torchrun.sh", "--hybrid_sharding", "true", GPUS="8", NODES="2", NODE_RANK="1", HEAD="10.0.0.1")
    launcher, job = torchrun_parts(command)
    assert (launcher["--nnodes"], launcher["--node_rank"], launcher["--master_addr"]) == ("2", "1", "10.0.0.1")
    assert job == ["--hybrid_sharding", "true"]


SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "61234",
         "SLURM_GPUS_ON_NODE": "4", "SLURM_SUBMIT_DIR": str(ROOT)}  # fmt: skip


def test_slurm_starts_one_launcher_a_node_that_meet_at_the_first(run):
    commands = run("slurm.sbatch", "--run_name", "a b", **SLURM)
    launchers, jobs = zip(*map(torchrun_parts, commands), strict=True)
    assert [one["--node_rank"] for one in launchers] == ["0", "1"]
    for one in launchers:
        assert (one["--nnodes"], one["--nproc_per_node"]) == ("2", "4")
        assert one["--master_addr"] == "gpu07"
        assert one["--master_port"] == str(20000 + 61234 % 20000)
    assert set(map(tuple, jobs)) == {
        ("--resume_from_checkpoint", "auto", "--hybrid_sharding", "true", "--run_name", "a b")
    }


def test_slurm_on_one_node_does_not_replicate(run):
    command = run("slurm.sbatch", **{**SLURM, "SLURM_JOB_NUM_NODES": "1"})[0]
    assert torchrun_parts(command)[1][-2:] == ["--hybrid_sharding", "false"]


def test_the_sbatch_header_asks_for_one_launcher_on_every_node():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (LAUNCH / "slurm.sbatch").read_text(), re.M))
    assert asked["ntasks-per-node"] == "1"
    assert int(asked["nodes"]) > 1
    assert int(asked["gpus-per-node"]) == 8


def test_the_jobset_is_whole():
    manifest = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [node] = manifest["spec"]["replicatedJobs"]
    job = node["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    launcher, settings = torchrun_parts(shlex.split(container["args"][0].removeprefix("exec ")))
    assert job["completionMode"] == "Indexed"
    assert launcher["--node_rank"] == "$JOB_COMPLETION_INDEX"
    assert job["parallelism"] == job["completions"] == int(launcher["--nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launcher["--nproc_per_node"])
    name = manifest["metadata"]["name"]
    assert launcher["--master_addr"] == f"{name}-{node['name']}-0-0.{name}"
    assert container["ports"][0]["containerPort"] == int(launcher["--master_port"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert any(m["mountPath"] == "/dev/shm" for m in container["volumeMounts"])
    assert pod["restartPolicy"] == "Never"  # a pod that starts again alone would wait for ranks that are gone
    _, args, _ = recipe.parse(REAL, settings)  # every setting of the line exists
    assert args.resume_from_checkpoint == "auto"  # maxRestarts would else meet a folder that holds a run


def test_a_launcher_that_says_nothing_of_fsdp_still_shards_inside_each_machine():
    # What torchrun sets on 2 machines of 8 GPUs; the rest comes from the job's YAML file.
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "11", "LOCAL_RANK": "3"}
    announce_sharding(recipe.take_settings(REAL, ["--hybrid_sharding", "true"]), environment)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "8"


def test_the_readme_names_files_that_exist():
    for word in re.findall(r"(?:recipes|accelerate_configs)/[\w./]+", (LAUNCH / "README.md").read_text()):
        assert (ROOT / word).exists(), word
