"""Public tasks by lm-eval: a task file on disk, against likelihoods worked out by hand; one line where the extra is missing."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_pipelines.tokens import save_tokenizer, train_tokenizer
from raytune70b.config import UserError, compose
from raytune70b.evaluation.models import Compared
from raytune70b.evaluation.public import public_measures, public_scores, public_table
from raytune70b.storage import Folder
from tests.export.run_folders import TEXTS, VOCAB
from tests.reference import write_model

QUESTIONS = [{"question": f"Clause {n}: who is bound?", "choices": ["The Supplier.", "Le Prêteur.", "Nobody at all."], "label": n % 3} for n in range(12)]
TASK = """
task: clauses
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("public")
    folders = {name: write_model(root / name, "llama", VOCAB, seed=seed) for seed, name in enumerate(("base", "tuned"))}
    for folder in folders.values():
        save_tokenizer(train_tokenizer(TEXTS * 40, VOCAB), Folder(folder))
    (root / "clauses.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (root / "tasks").mkdir()
    (root / "tasks" / "clauses.yaml").write_text(TASK.format(file=root / "clauses.jsonl"))
    return Compared(folders, Folder(root / "evaluation"), "tuned"), root


def accuracy_by_hand(folder) -> float:
    """Of the choices, the one of the highest summed log-likelihood after the question and a space."""
    tokenizer, model = AutoTokenizer.from_pretrained(str(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for q in QUESTIONS:
        context, likelihoods = tokenizer.encode(q["question"]), []
        for choice in q["choices"]:
            ids = tokenizer.encode(f"{q['question']} {choice}")
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            likelihoods.append(-F.cross_entropy(logits[len(context) - 1 : -1], torch.tensor(ids[len(context) :]), reduction="sum").item())
        right += likelihoods.index(max(likelihoods)) == q["label"]
    return right / len(QUESTIONS)


@pytest.mark.slow
def test_a_task_on_disk_is_scored_as_by_hand(models):
    pytest.importorskip("lm_eval")
    torch.set_num_threads(1)
    compared, root = models
    scores = public_scores(compose(["evaluation.tasks=[clauses]", f"evaluation.tasks_path={root / 'tasks'}", "evaluation.dtype=fp32"]), compared)
    found = {s.model: s for s in scores}
    assert {name: s.value for name, s in found.items()} == {name: accuracy_by_hand(folder) for name, folder in compared.folders.items()}
    assert all((s.task, s.metric, s.items) == ("clauses", "acc", len(QUESTIONS)) for s in scores)
    assert f"{found['tuned'].value:.4f} +- " in public_table(scores) and "evaluation/public_clauses/acc/tuned" in public_measures(scores)
    with pytest.raises(UserError, match="knows no task claws"):
        public_scores(compose(["evaluation.tasks=[claws]"]), compared)


def test_without_the_extra_one_line_says_what_to_install(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError) as caught:
        public_scores(compose(["evaluation.tasks=[clauses]"]), models[0])
    assert "pip install 'raytune70b[lm-eval]'" in str(caught.value) and "\n" not in str(caught.value)
