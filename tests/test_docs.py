"""README and docs: links lead somewhere, code blocks run or at least parse, commands and settings exist. No network."""

import ast
import re
import shlex
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml

import hf_speedkit

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for place in ("*.md", "docs/*.md", "examples/*.md", "recipes/**/*.md") for page in ROOT.glob(place))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@cache
def text(path):
    return path.read_text(encoding="utf-8")


def blocks(path, *kinds):
    return [body for kind, body in FENCE.findall(text(path)) if kind in kinds]


def anchors(path):
    """What a heading is called in a link, as GitHub and mkdocs make it."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", text(page)))
    for link in LINK.findall(prose):
        place, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page if not place else (page.parent / place).resolve()
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.name != "api.md":  # its headings are made from docstrings
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_parse_and_import_what_there_is(page):
    for body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_speedkit"):
                exec(f"from {node.module} import {', '.join(alias.name for alias in node.names)}", {})


@cache
def options():
    """Long options of every subcommand."""
    import typer

    from hf_speedkit.cli.main import app

    commands = typer.main.get_command(app).commands
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }


def commands(page):
    lines = "\n".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(hf-speedkit [a-z]+[^`]*|make [a-z-]+[^`]*)`", FENCE.sub("", text(page)))
    lines = [line.removeprefix("cd job && ") for line in (*lines, *inline)]
    return [re.sub(r"\s+#.*", "", line) for line in lines if re.match(r"(hf-speedkit|make|accelerate|pip) ", line)]


EXTRAS = set(tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_have_the_names_and_options_that_are_shown(page):
    targets = re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE)
    for line in commands(page):
        program, name, *words = [word for word in shlex.split(line) if word not in ("...", "&&")]
        if program == "make":
            assert name in targets, line
            continue
        if program == "accelerate":
            assert all((ROOT / word).is_file() for word in words if word.endswith((".py", ".yaml"))), line
            continue
        if program == "pip":
            asked = {extra for word in words for extra in re.findall(r"^(?:\.|hf-speedkit)\[([\w,-]+)\]", word)}
            assert {one for extra in asked for one in extra.split(",")} <= EXTRAS, line
            continue
        if name.startswith("-"):
            continue
        assert name in options(), line
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options()[name] | {"--help"}, line


EXAMPLES = blocks(ROOT / "docs" / "extending.md", "python")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_what_extending_shows_runs_and_is_short(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert len(EXAMPLES[number].splitlines()) < 30
    exec(compile(EXAMPLES[number], f"extending.md, block {number + 1}", "exec"), {"__name__": "extending"})
    if number == 2:
        assert "many_cats" in capsys.readouterr().out


def test_the_settings_that_migration_names_exist():
    from qwen27b_sft import RecipeArguments
    from trl import ModelConfig

    known = {
        field.name for kind in (hf_speedkit.SpeedSFTConfig, ModelConfig, RecipeArguments) for field in fields(kind)
    }
    rows = [line.split("|") for line in text(ROOT / "docs" / "migration.md").splitlines() if line.startswith("| ")]
    ours = [cell for row in rows for cell in re.findall(r"`([^`]+)`", row[2])]
    names = {re.split(r"[:=]", cell)[0].strip() for cell in ours if re.match(r"[a-z_0-9]+\b(?!\()", cell)}
    assert len(names) > 20
    elsewhere = {"speed/total_real_tokens"}
    assert {name for name in names if name not in known} <= elsewhere
    # And TRL's column, for TRL: the other tools are not installed here.
    trl = text(ROOT / "docs" / "migration.md").partition("## From TRL")[2].partition("\n## ")[0]
    theirs = re.findall(r"^\| `([a-z_]+)", trl, re.MULTILINE)
    assert set(theirs) <= known


def test_every_page_has_its_place_and_every_public_name_its_entry():
    # mkdocs.yml has no tags of its own, so that any YAML reader reads it.
    navigation = yaml.safe_load(text(ROOT / "mkdocs.yml"))["nav"]
    listed = {
        page for entry in navigation for page in (next(iter(entry.values())) if isinstance(entry, dict) else [entry])
    }
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}
    entries = re.findall(r"^::: hf_speedkit\.(\w+)$", text(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted(entries) == sorted(set(hf_speedkit.__all__) - {"__version__"})


def test_every_file_of_ours_that_code_and_pages_name_exists():
    named = re.compile(
        r"(?<![\w/.\-])((?:hf_speedkit|tests|benchmarks|recipes|scripts|examples|docs|core|kernels|packing|measure|cli|"
        r"trainer/\w+)/[\w/\-]+\.(?:py|md|yaml))\b"
    )
    others = {  # TRL's, Axolotl's, VeOmni's
        "kernels/chunked_logprob.py", "scripts/analyze_profile.py", "docs/design/kernel_selection.md",
        "tests/models/test_model_forward_no_implicit_sync.py",
    }  # fmt: skip
    code = [path for room in ("hf_speedkit", "benchmarks", "recipes", "tests") for path in (ROOT / room).rglob("*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*PAGES, *code, *(ROOT / "benchmarks").glob("*.md"))
        for name in named.findall(text(path))
        if name not in others
        and not any((base / name).exists() for base in (ROOT, ROOT / "hf_speedkit", ROOT / "tests"))
    ]
    assert missing == []


def test_every_public_report_has_a_test_and_every_number_a_report():
    listed = set(re.findall(r"^\| V(\d\d) \|", text(ROOT / "docs" / "reports.md"), re.MULTILINE))
    code = "\n".join(text(path) for room in ("hf_speedkit", "tests") for path in (ROOT / room).rglob("*.py"))
    assert set(re.findall(r"\bV(\d\d)\b", code)) <= listed
    tests = " ".join(re.findall(r"def test_\w+|[\"'][^\"'\n]*v\d\d[^\"'\n]*[\"']", code))
    assert set(re.findall(r"(?<![a-zA-Z0-9])v(\d\d)(?!\d)", tests.replace("_", " "))) >= listed
