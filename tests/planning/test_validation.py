"""The plan's model against runs that other people published: each source predicted by constants fitted on the others only."""

from dataclasses import replace
from pathlib import Path

import pytest

from raytune70b.planning.published import TableError, read_table
from raytune70b.planning.throughput import FITTED
from raytune70b.planning.validation import PRIOR, fit, fit_fragments, score, validate, write_predictions

TABLE = Path(__file__).parents[1] / "data" / "published_throughput.csv"


@pytest.fixture(scope="module")
def validation():
    return validate(TABLE)


def test_memory_of_unseen_sources(validation):
    result = score(validation.predictions)
    assert result["memory_rows"] == 115
    assert result["memory_median_error"] <= 0.08
    assert result["fits_right"] >= 0.90


def test_speed_of_unseen_sources(validation):
    result = score(validation.predictions)
    assert result["speed_rows"] == 268
    assert result["speed_median_error"] <= 0.15
    assert result["in_band"] >= 0.80


def test_every_row_is_predicted_or_left_out_with_its_reason(validation):
    lines = [p.run.line for p in validation.predictions] + [row.line for row in validation.left]
    rows = len(TABLE.read_text().splitlines()) - 1
    assert sorted(lines) == list(range(2, rows + 2))
    assert all(row.reason for row in validation.left)


def test_a_source_has_no_part_in_its_own_constants(validation):
    runs, _ = read_table(TABLE)
    source = "pytorch/torchtitan docs/performance.md (2024, A100)"
    halved = [replace(r, tokens_per_s_per_gpu=r.tokens_per_s_per_gpu / 2) if r.source == source else r for r in runs if r.tokens_per_s_per_gpu]
    assert fit([r for r in halved if r.source != source]) == validation.constants[source]
    assert fit(halved) != fit([r for r in runs if r.tokens_per_s_per_gpu])


def test_the_constants_in_use_are_those_fitted_to_the_whole_table():
    runs, _ = read_table(TABLE)
    fitted = fit(runs)
    for name in (*PRIOR, "low", "high"):
        assert getattr(FITTED, name) == pytest.approx(getattr(fitted, name), rel=0.01), name
    from raytune70b.planning.memory import FRAGMENTS

    assert fit_fragments(runs) == FRAGMENTS


def test_predictions_are_written(validation, tmp_path):
    write_predictions(validation, tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == len(TABLE.read_text().splitlines())
    assert "tensor, pipeline or context parallelism" in "".join(lines)


def test_a_table_of_something_else_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match="has no column 'source'"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(TableError, match="holds no rows"):
        read_table(tmp_path / "e.csv")
    with pytest.raises(TableError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
