"""The package as a whole: light to import, public names there, rooms small enough to read."""

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import hf_speedkit
from hf_speedkit.core import records

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "hf_speedkit").rglob("*.py"))


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_the_package_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'accelerate', 'numpy', 'rich', 'typer'}"
    assert python(f"import hf_speedkit, sys; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_every_public_name_resolves_and_is_listed():
    for name in hf_speedkit.__all__:
        assert getattr(hf_speedkit, name) is not None
    assert set(dir(hf_speedkit)) == set(hf_speedkit.__all__)
    for module in (hf_speedkit, records):
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = module.missing


def test_every_record_is_found_among_the_records():
    """Two live in files of their own, for their size; the rest of the vocabulary is where they are looked for."""
    assert records.TraceSummary.__module__ == "hf_speedkit.core.trace_records"
    assert records.BenchResult.__module__ == "hf_speedkit.core.bench_records"


def test_the_command_line_answers_at_once():
    command = [str(Path(sys.executable).with_name("hf-speedkit")), "--help"]
    seconds = []
    for _ in range(3):  # of the processor, since the machine may be busy with something else
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "Usage" in shown
    assert min(seconds) < 0.6


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_the_version_is_printed(module):
    script = str(Path(sys.executable).with_name("hf-speedkit"))
    command = [*([sys.executable, "-m", "hf_speedkit"] if module else [script]), "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == hf_speedkit.__version__


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_makes_its_reader_scroll(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350
    assert path.name not in ("utils.py", "helpers.py", "common.py")


ROOMS = [path for path in SOURCES if path.name == "__init__.py" and path.parent != ROOT / "hf_speedkit"]


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.parent.relative_to(ROOT / "hf_speedkit")))
def test_each_room_says_at_its_door_what_is_where(room):
    said = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8")))
    named = [name for group in said.split("\n- ")[1:] for name in re.findall(r"\w+", group.partition(":")[2])]
    inside = [path for path in room.parent.iterdir() if path != room and not path.name.startswith("__")]
    assert sorted(named) == sorted(path.stem for path in inside if path.suffix == ".py" or any(path.glob("*.py")))


@pytest.mark.parametrize("config", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_each_launch_config(config):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(config))
    assert loaded.mixed_precision == "no"
    if "fsdp2" in config.name:
        assert loaded.fsdp_config["fsdp_version"] == 2
        assert loaded.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "Qwen3_5DecoderLayer"


def test_no_two_test_files_have_one_name():
    """Test folders are no packages, so pytest would take the second for the first and end."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
