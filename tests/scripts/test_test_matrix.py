"""scripts/test_matrix.py: which environments it makes, and where it writes what became of them."""

import pytest
import test_matrix


def test_the_rows_are_every_python_and_both_ends_of_the_stack():
    rows = {row.name: row for row in test_matrix.rows()}
    assert list(rows) == ["python3.11", "python3.12", "python3.13", "lowest", "newest"]
    assert set(test_matrix.lower_bounds()) == set(test_matrix.STACK)
    assert "transformers==5.23" in rows["lowest"].constraints
    assert any(pin.startswith("transformers==5.23.") for pin in rows["python3.12"].constraints)
    assert rows["newest"].constraints == ()


def test_the_table_goes_between_its_markers():
    row = test_matrix.Row("newest", "3.13", ())
    outcome = test_matrix.Outcome(row, {"Python": "3.13.0", "torch": "2.14.1"}, True, "7 passed")
    document = f"before\n{test_matrix.BEGIN}\nold\n{test_matrix.END}\nafter\n"
    text = test_matrix.written(document, test_matrix.table([outcome], "pytest -q"))
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| newest | 3.13.0 | 2.14.1 | - | - | - | - | 7 passed |" in text
    assert "old" not in text
    with pytest.raises(SystemExit, match="is missing"):
        test_matrix.written("no markers", "")


def test_an_environment_that_is_not_known_is_wrong_use(capsys):
    with pytest.raises(SystemExit) as stopped:
        test_matrix.main(["oldest"])
    assert stopped.value.code == 2
    assert "there are: python3.11" in capsys.readouterr().err


def test_a_python_that_is_not_here_is_said_and_nothing_is_made(tmp_path):
    outcome = test_matrix.run(test_matrix.Row("old", "2.1", ()), tmp_path, [])
    assert not outcome.passed
    assert outcome.said == "not run: no Python 2.1 here"
    assert list(tmp_path.iterdir()) == []
