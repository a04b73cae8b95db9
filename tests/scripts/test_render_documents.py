import pytest
import render_metrics
import render_settings


@pytest.mark.parametrize("script", [render_metrics, render_settings], ids=["metrics", "settings"])
def test_the_document_is_that_of_the_code(script):
    assert script.DOCUMENT.read_text(encoding="utf-8") == script.rendered(), f"run: python scripts/{script.__name__}.py"


def test_every_setting_of_ours_has_a_row():
    ours = set(render_settings.SpeedSFTConfig.__annotations__)
    assert ours - {"_VALID_DICT_FIELDS"} <= set(render_settings.described()) | {
        "logging_nan_inf_filter",
        "per_device_eval_batch_size",
    }
