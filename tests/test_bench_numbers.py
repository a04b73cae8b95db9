"""Every number of the README's table and picture comes from a committed file, and every such file can be trusted."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.cli.report_bench import bars, bench_files, into, read
from hf_speedkit.core.bench_records import bench_result, is_bench, missing_provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / re.search(r"^RESULTS = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


def committed():
    return read(bench_files([RESULTS]))


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_a_page_holds_the_table_of_the_committed_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert into(text, committed()) == text, "run: make bench-table"


def test_the_picture_is_that_of_the_committed_files():
    assert (ROOT / "docs" / "ladder.svg").read_text(encoding="utf-8") == bars(committed()), "run: make bench-table"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "benchmarks" / "results")))
def test_a_committed_result_says_where_it_comes_from(path):
    values = json.loads(path.read_text(encoding="utf-8"))
    if is_bench(values):
        assert missing_provenance(bench_result(values, name=path.name)) == ()
    else:  # a study of its own form
        assert "environment" in values
        assert values["what"]


def test_make_bench_table_writes_what_the_tests_look_at(tmp_path):
    document = tmp_path / "README.md"
    document.write_text((ROOT / "README.md").read_text(encoding="utf-8").replace("real tokens/s |", "other |"))
    done = CliRunner().invoke(app, ["report", str(RESULTS), "--out", str(document)])
    assert done.exit_code == 0, done.output
    assert document.read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")
