from render_metrics import DOCUMENT, rendered


def test_the_document_of_metrics_is_that_of_the_code():
    assert DOCUMENT.read_text(encoding="utf-8") == rendered(), "run: python scripts/render_metrics.py"
