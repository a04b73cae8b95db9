"""Where Triton and TileLang keep what they compiled."""

from pathlib import Path

import pytest

from hf_speedkit.kernels.caches import cache_folders


@pytest.mark.parametrize(
    ("environment", "triton", "tilelang"),
    [
        ({"HOME": "/root"}, "/root/.triton/cache", "/root/.tilelang/cache"),
        ({"HOME": "/root", "TRITON_HOME": "/fast"}, "/fast/.triton/cache", "/root/.tilelang/cache"),
        ({"TRITON_CACHE_DIR": "/t", "TILELANG_CACHE_DIR": "/l", "TRITON_HOME": "/fast"}, "/t", "/l"),
    ],
    ids=["home", "triton_home", "both_named"],
)
def test_the_folders_follow_the_environment(environment, triton, tilelang):
    found = cache_folders(environment)
    assert [folder.path for folder in found] == [Path(triton), Path(tilelang)]
    assert [folder.variable for folder in found] == ["TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"]


def test_files_are_counted_to_any_depth_and_a_missing_folder_has_none(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).touch()
    here, nowhere = cache_folders({"TRITON_CACHE_DIR": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path / "none")})
    assert (here.files(), nowhere.files()) == (3, 0)
