"""scripts/release.py: what is built here is whole, and what is not ready or not whole is named."""

import zipfile
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("dist"))


def test_wheel_and_sdist_of_this_tree_are_whole(built):
    wheel, sdist = built
    assert release.wheel_problems(wheel) == []
    assert release.sdist_problems(sdist) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("hf_speedkit/py.typed", None, "lacks hf_speedkit/py.typed"),
        ("hf_speedkit/cli/main.py", None, "lacks hf_speedkit/cli/main.py"),
        ("hf_speedkit-{version}.dist-info/licenses/LICENSE", None, "licenses/LICENSE"),
        ("hf_speedkit/cli/main.py", b"changed", "hf_speedkit/cli/main.py is not what RECORD says"),
        ("tests/conftest.py", b"", "would be installed beside the package"),
        ("hf_speedkit/runs/model.safetensors", b"", "holds hf_speedkit/runs/model.safetensors"),
    ],
)
def test_a_wheel_that_is_not_whole_is_named(built, tmp_path, name, content, said):
    name = name.format(version=release.version_of(ROOT))
    copy = tmp_path / built[0].name
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(copy, "w") as broken:
        for member in whole.namelist():
            if member != name:
                broken.writestr(member, whole.read(member))
        if content is not None:
            broken.writestr(name, content)
    assert any(said in problem for problem in release.wheel_problems(copy))


def test_metadata_that_an_index_would_refuse_is_named(built):
    with zipfile.ZipFile(built[0]) as wheel:
        path = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        text = wheel.read(path).decode()
    changed = text.replace("License-Expression: Apache-2.0", "License: whatever").replace("torch>=2.11", "torch==2.11")
    said = "\n".join(release.metadata_problems(changed))
    assert "License-Expression is None" in said
    assert "torch==2.11 pins a version" in said


@pytest.fixture
def ready(tmp_path):
    """A tree of version 1.2.0 that could be released."""
    (tmp_path / "hf_speedkit").mkdir()
    (tmp_path / "hf_speedkit" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2030-01-31)\n- New.\n\n## 1.1.0 (2029-01-31)\n- Old.\n"
    )
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.0\ndate-released: 2030-01-31\nlicense: Apache-2.0\n")
    return tmp_path


def test_a_tree_that_is_ready_has_nothing_to_mend(ready):
    assert release.unready(ready, tags=["v1.1.0"]) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("hf_speedkit/__init__.py", "1.2.0", "1.2", "is not a release"),
        ("hf_speedkit/__init__.py", "1.2.0", "1.1.0", "v1.1.0 is tagged already"),
        ("CHANGELOG.md", "## 1.2.0 ", "## 1.3.0 ", "does not begin with a section '## 1.2.0"),
        ("CHANGELOG.md", "2030-01-31", "unreleased", "has no date"),
        ("CHANGELOG.md", "- New.\n", "", "says nothing"),
        ("CITATION.cff", "version: 1.2.0", "version: 1.1.0", "CITATION.cff does not say 'version: 1.2.0'"),
        ("CITATION.cff", "2030", "2029", "CITATION.cff does not say 'date-released: 2030-01-31'"),
    ],
)
def test_a_tree_that_is_not_ready_says_why(ready, file, old, new, said):
    path = ready / file
    path.write_text(path.read_text().replace(old, new))
    assert any(said in problem for problem in release.unready(ready, tags=["v1.1.0"]))


def test_a_changed_file_is_named(ready):
    assert release.unready(ready, changed=[" M README.md"]) == ["not committed:  M README.md"]


def test_the_citation_states_this_version():
    assert f"\nversion: {release.version_of(ROOT)}\n" in (ROOT / "CITATION.cff").read_text()
