import io
import types

from raytune70b.config import compose
from raytune70b.evaluation.job import Evaluated
from raytune70b.evaluation.page import page
from raytune70b.evaluation.public import Score


def test_the_page_is_the_same_whatever_the_locale(monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    compared = types.SimpleNamespace(title="law", folders={"tuned": "/runs/law"})
    held_out = types.SimpleNamespace(texts=[], too_long=0, unusable=0)
    score = Score(task="mmlu_law", metric="acc", items=10, model="tuned", value=0.5, stderr=0.01)
    assert "±" in page(compose([]), Evaluated(compared, held_out, {"tuned": None}, [], [score], 1.0), [])
