"""docker/Dockerfile, read line by line: nothing is built here."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from hf_speedkit.kernels.stack import parse_architecture

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions():
    """(instruction, arguments) of the Dockerfile, continued lines joined, comments left out."""
    lines = [
        line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def of(kind):
    return [arguments for instruction, arguments in instructions() if instruction == kind]


def pins(name):
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in found}


def test_the_base_is_pinned_to_a_release_and_its_python_is_one_that_we_run_on():
    (base,) = of("FROM")
    name, tag = re.fullmatch(r"([\w./-]+):([\w.-]+)(?:@sha256:[0-9a-f]{64})?", base).groups()
    assert (name, tag) == ("python", tag)
    version = re.match(r"\d+\.\d+\.\d+", tag)
    assert version is not None, f"{tag} moves with each release"
    assert version.group() in SpecifierSet(PROJECT["requires-python"])
    assert not re.search(r"\blatest\b", (ROOT / "docker/Dockerfile").read_text())


def test_package_lists_of_apt_are_removed_in_the_layer_that_fetched_them():
    fetching = [run for run in of("RUN") if "apt-get" in run]
    assert fetching
    for run in fetching:
        assert "--no-install-recommends" in run
        assert run.endswith("rm -rf /var/lib/apt/lists/*")


def test_there_is_no_secret_in_the_image():
    for kind in ("ARG", "ENV"):
        for arguments in of(kind):
            assert not re.search(r"token|secret|password|api_?key", arguments, re.IGNORECASE)
    assert not re.search(r"\bhf_[A-Za-z0-9]{16,}", (ROOT / "docker/Dockerfile").read_text())


def test_doctor_has_the_last_word_and_its_answer_counts():
    assert instructions()[-1] == ("RUN", 'HF_HUB_OFFLINE=1 hf-speedkit doctor "$MODEL" --gpu "$GPU"')


def test_the_defaults_are_a_gpu_that_doctor_knows_and_the_recipes_model():
    given = dict(argument.split("=") for argument in of("ARG"))
    assert parse_architecture(given["GPU"]) == (9, 0)
    recipe = yaml.safe_load((ROOT / "recipes/qwen27b_sft.yaml").read_text())
    assert given["MODEL"] == recipe["model_name_or_path"]


def test_every_version_is_pinned_and_within_what_pyproject_allows():
    kernels, others = pins("docker/kernels.txt"), pins(".ci/constraints.txt")
    assert not set(kernels) & set(others), "one place for each pin"
    installs = [run for run in of("RUN") if "pip install" in run]
    assert all("-c pins/constraints.txt -c pins/kernels.txt" in run for run in installs)
    extras = PROJECT["optional-dependencies"]
    for wanted in map(Requirement, [*PROJECT["dependencies"], *extras["kernels"], *extras["wandb"]]):
        found = {**others, **kernels}.get(canonicalize_name(wanted.name))
        assert found is not None, f"{wanted.name} has no pin"
        assert found in wanted.specifier


def test_what_is_copied_is_there_and_let_through_and_nothing_else_is():
    copied = [source for arguments in of("COPY") for source in arguments.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignored
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(copied)


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"])
def test_the_caches_lie_where_a_volume_can_keep_them(variable):
    (environment,) = of("ENV")
    assert dict(pair.split("=") for pair in environment.split())[variable].startswith("/cache/")
    assert any("mkdir -p /cache" in run for run in of("RUN"))


def test_the_document_points_at_the_file_and_does_not_repeat_it():
    text = (ROOT / "docs/kernels.md").read_text()
    assert "docker/Dockerfile" in text
    assert "FROM " not in text
