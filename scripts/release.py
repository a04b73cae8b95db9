#!/usr/bin/env python3
"""Check that a release is ready, build it into dist/, and judge what was built. Uploads nothing.

    python scripts/release.py              # before a release: version, changelog, citation, clean tree, then build
    python scripts/release.py --wheel      # `make test-wheel`: build, and use the wheel in an empty environment

Exit 0: ready. 1: something must be mended first; every problem is a line.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import install

ROOT = Path(__file__).resolve().parent.parent
LARGEST_MB = 5
IN_WHEEL = (
    "hf_speedkit/__init__.py",
    "hf_speedkit/py.typed",
    "hf_speedkit/shipped/recipes/qwen27b_sft.py",
    "hf_speedkit/shipped/recipes/qwen27b_sft.yaml",
    "hf_speedkit/shipped/accelerate_configs/fsdp2.yaml",
)
IN_SDIST = (
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "tests/conftest.py",
    "examples/tiny.py",
)
NOT_SHIPPED = re.compile(r"__pycache__|\.pyc$|\.egg-info|(^|/)runs/|\.safetensors$|(^|/)\.(gpu|venv)")
EXAMPLES = ("tiny", "existing_trainer", "sft_after", "strangers_trace")


def version_of(root):
    """The version that hf_speedkit/__init__.py states."""
    text = (root / "hf_speedkit" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def unready(root, *, tags=(), changed=()):
    """What must be done before this version can be released, one sentence each.

    Args:
        root: the repository.
        tags: names of tags that exist.
        changed: files that are not committed.
    """
    version = version_of(root)
    found = [f"not committed: {name}" for name in changed]
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"__version__ = {version!r} is not a release (MAJOR.MINOR.PATCH)")
    if f"v{version}" in tags:
        found.append(f"v{version} is tagged already: raise __version__ in hf_speedkit/__init__.py")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \(([^)]+)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    date = newest.group(2) if newest else ""
    if newest is None or newest.group(1) != version:
        found.append(f"CHANGELOG.md does not begin with a section '## {version} (YYYY-MM-DD)'")
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        found.append(f"CHANGELOG.md: {version} has no date but '{date}'")
    elif "- " not in newest.group(3):
        found.append(f"CHANGELOG.md: the section of {version} says nothing")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff does not say 'version: {version}'")
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) and f"\ndate-released: {date}\n" not in citation:
        found.append(f"CITATION.cff does not say 'date-released: {date}'")
    return found


def build(folder):
    """Build wheel and sdist; returns both paths.

    Raises:
        SystemExit: the build failed.
    """
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit("the build failed; hatchling comes with pip install -e '.[dev]'")
    version = version_of(ROOT)
    return folder / f"hf_speedkit-{version}-py3-none-any.whl", folder / f"hf_speedkit-{version}.tar.gz"


def wheel_problems(path, root=ROOT):
    """What is wrong with a wheel: files, checksums, metadata, licence, entry point."""
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    info = f"hf_speedkit-{version_of(root)}.dist-info"
    # A contributor's module that is not in the wheel imports from the checkout and nowhere else.
    sources = {str(file.relative_to(root)) for file in (root / "hf_speedkit").rglob("*.py")}
    wanted = {*IN_WHEEL, *sources, f"{info}/METADATA", f"{info}/RECORD", f"{info}/licenses/LICENSE"}
    found = [f"{path.name} lacks {name}" for name in sorted(wanted - files.keys())]
    found += [f"{path.name} holds {name}" for name in sorted(files) if NOT_SHIPPED.search(name)]
    found += [
        f"{path.name} holds {name}, which would be installed beside the package"
        for name in sorted(files)
        if not name.startswith(("hf_speedkit/", f"{info}/"))
    ]
    if found:
        return found
    for name, recorded, _size in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode())):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if recorded and recorded != f"sha256={digest}":
            found.append(f"{path.name}: {name} is not what RECORD says")
    if "hf-speedkit = hf_speedkit.__main__:main" not in files[f"{info}/entry_points.txt"].decode():
        found.append(f"{path.name} installs no hf-speedkit command")
    return found + metadata_problems(files[f"{info}/METADATA"].decode(), root)


def metadata_problems(text, root=ROOT):
    """What an index would refuse, or show wrongly, in METADATA or PKG-INFO."""
    said = email.message_from_string(text)
    wanted = {
        "Name": "hf-speedkit",
        "Version": version_of(root),
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    found = [f"metadata: {key} is {said[key]!r}, not {value!r}" for key, value in wanted.items() if said[key] != value]
    if not 0 < len(said["Summary"] or "") <= 512 or "\n" in said["Summary"]:
        found.append("metadata: Summary must be one line of at most 512 characters")
    if said.get_payload().strip() != (root / "README.md").read_text(encoding="utf-8").strip():
        found.append("metadata: the description is not README.md")
    pinned = [need for need in said.get_all("Requires-Dist", []) if "==" in need.split(";")[0]]
    return found + [f"metadata: {need} pins a version; ranges belong here" for need in pinned]


def sdist_problems(path, root=ROOT):
    """What is wrong with a source distribution."""
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    found = [f"{path.name} lacks {name}" for name in IN_SDIST if name not in names]
    found += [f"{path.name} holds {name}" for name in sorted(names) if NOT_SHIPPED.search(name)]
    if path.stat().st_size > LARGEST_MB << 20:
        found.append(f"{path.name} is larger than {LARGEST_MB} MiB")
    return found


def try_wheel(wheel, venv):
    """Install the wheel into an empty environment and use it where there is no repository; returns what failed."""
    maker = install.Installer(
        venv=venv, extras="", constraints=ROOT / ".ci" / "constraints.txt", system="Linux",
        has_gpu=install.nvidia_gpu(), torch_index=os.environ.get("TORCH_INDEX_URL"), run=install.run_command,
        package=wheel,
    )  # fmt: skip
    maker.install()
    with tempfile.TemporaryDirectory(prefix="speedkit_wheel_") as folder:
        return use(Path(maker.python), Path(folder))


def use(python, folder):
    """Run the commands and examples that the README promises; returns what failed, one line each."""
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / f"{name}.py", folder)
    (folder / "lengths.json").write_text("[900, 1200, 300, 2500]", encoding="utf-8")
    config = "from transformers import Qwen3_5TextConfig; Qwen3_5TextConfig().save_pretrained('model')"
    tool = python.with_name("hf-speedkit")
    steps = [
        ([python, "-c", config], (0,), ""),
        ([tool, "--version"], (0,), version_of(ROOT)),
        ([tool, "doctor", "model"], (0, 1), "chunk_gated_delta_rule"),
        ([tool, "plan", "--lengths", "lengths.json"], (0,), "4 documents"),
        ([tool, "recipe", "qwen27b_sft"], (0,), "accelerate launch recipes/qwen27b_sft.py"),
        ([python, "existing_trainer.py"], (0,), "real tokens/s"),
        ([python, "sft_after.py"], (0,), "speed/total_real_tokens"),
        ([python, "strangers_trace.py"], (0,), "aten::"),
        ([tool, "trace", "strangers_trace.json"], (0, 1), "Verdict"),
    ]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    failed = []
    for command, codes, words in steps:
        shown = " ".join([Path(command[0]).name, *map(str, command[1:])])
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=kept, capture_output=True, text=True, check=False
        )
        good = done.returncode in codes and words in done.stdout
        print(f"wheel  {'ok    ' if good else 'FAILED'} {shown[:90]}", flush=True)
        if not good:
            failed.append(f"{shown}: exit {done.returncode}, without {words!r}\n{install.tail(done)}")
    return failed


def git(*arguments):
    """Lines that git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def main(arguments):
    """Check, build, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", action="store_true", help="build, and use the wheel in an empty environment")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheel and sdist go")
    parser.add_argument("--venv", type=Path, help="the environment for --wheel; a temporary one by default")
    given = parser.parse_args(arguments)
    problems = [] if given.wheel else unready(ROOT, tags=git("tag"), changed=git("status", "--porcelain"))
    if not problems:
        wheel, sdist = build(given.out)
        problems = wheel_problems(wheel) + sdist_problems(sdist)
    if given.wheel and not problems:
        with tempfile.TemporaryDirectory(prefix="speedkit_venv_") as folder:
            problems = try_wheel(wheel, given.venv or Path(folder) / "venv")
    for problem in problems:
        print(f"to mend: {problem}", file=sys.stderr)
    if not problems and not given.wheel:
        print(f"ready: {wheel.name}, {sdist.name} in {given.out}\n"
              f"Then: git tag v{version_of(ROOT)}, push the tag, and upload the two files with twine.")  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
