"""A user's own three files and own model go through prepare, finetune and export with no code change; mistakes are one line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raytune70b.blocks.manifest import read_manifest
from raytune70b.storage import Folder
from tests.running import run_job

CLAUSES = [
    "The tenant shall pay the rent on the first day of each month.", "Le locataire paie le loyer le premier jour de chaque mois.",
    "The landlord maintains the premises in good repair.", "Le bailleur entretient les lieux en bon état.",
    "Either party may terminate this agreement upon written notice.", "Chaque partie peut résilier le contrat par avis écrit.",
]  # fmt: skip


def text(n):
    return " ".join(f"Article {n}.{k}. {CLAUSES[(n + k * (1 + n % 3)) % 6]} Ref {n * 31 + k}." for k in range(3))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder with three files of documents and a small Hugging Face model with its tokenizer."""
    folder = tmp_path_factory.mktemp("theirs")
    rows = [{"instruction": f"What does article {n} say?", "input": "", "output": text(n)} for n in range(40)]
    lines = [json.dumps(r) for r in rows[:20]] + ['{"instruction": "cut off', *[json.dumps(r) for r in rows[20:]]]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table({"text": [text(n) for n in range(100, 140)]}), folder / "documents.parquet")
    (folder / "notes.txt").write_text(text(999))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([text(n) for n in range(300)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=0, eos_token_id=1, **shape)).save_pretrained(folder / "model")
    return folder


def test_three_files_and_a_model(head, theirs, tmp_path):
    inputs = f"data.inputs=[{theirs}/pairs.jsonl,{theirs}/documents.parquet,{theirs}/notes.txt]"
    common = [f"data.path={tmp_path}/blocks", f"data.tokenizer={theirs}/model", "data.seq_len=128", "data.near_duplicates=0"]
    code, output = run_job("prepare", inputs, *common)
    assert code == 0, output
    manifest = read_manifest(Folder(tmp_path / "blocks"))
    documents = manifest.lineage["documents"]
    assert documents["read"] == 82 and sum(documents["quarantined"].values()) == 1
    assert documents["read"] == sum(sum(documents[k].values()) for k in ("kept", "quarantined", "duplicates", "dropped"))
    quarantined = "".join(p.read_text() for p in (tmp_path / "blocks" / "quarantine").glob("*.jsonl"))
    assert "pairs.jsonl" in quarantined and "21" in quarantined

    run = [f"run.path={tmp_path}/runs", "run.name=theirs", f"model.path={theirs}/model", "train.epochs=4", "train.global_batch_size=8", "train.warmup_steps=2", "train.learning_rate=1e-2"]
    code, output = run_job("finetune", *common, *run, "cluster.workers=[2,2]")
    assert code == 0, output
    code, output = run_job("export", f"{tmp_path}/runs/theirs", f"export.path={tmp_path}/exported")
    assert code == 0, output
    tuned, base = (AutoModelForCausalLM.from_pretrained(p) for p in (tmp_path / "exported", theirs / "model"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "exported")(text(7), return_tensors="pt")["input_ids"][:, :64]
    with torch.no_grad():
        assert tuned(ids, labels=ids).loss < 0.8 * base(ids, labels=ids).loss


@pytest.mark.parametrize(
    ("job", "arguments", "words"),
    [
        ("finetune", ["train.lr=1"], ["train.lr", "train.learning_rate"]),
        ("finetune", ["train.epochs=many"], ["train.epochs", "many"]),
        ("finetune", ["data.path=/nowhere/at/all"], ["/nowhere/at/all", "manifest.json", "jobs/prepare.py"]),
        ("sweep", ["data.path=/nowhere/at/all"], ["/nowhere/at/all", "manifest.json", "jobs/prepare.py"]),
        ("finetune", ["data.path=/nowhere/at/all", "data.inputs=[x]"], ["/nowhere/at/all", "manifest.json", "jobs/prepare.py"]),
        ("finetune", ["data.path={blocks}", "model.path=/nowhere"], ["model.path", "/nowhere", "config.json"]),
        ("finetune", ["data.path={blocks}", "model.config.max_position_embeddings=8"], ["256", "8"]),
        ("finetune", ["data.path={blocks}", "run.path={tmp}", "run.resume=must"], ["run.resume", "must", "no checkpoint"]),
        ("prepare", ["data.inputs=[/nowhere.jsonl]", "data.path={tmp}"], ["data.inputs", "/nowhere.jsonl"]),
        ("prepare", ["data.inputs=[{empty}]", "data.path={tmp}"], ["{empty}"]),
        ("prepare", ["data.tokenizer=/nowhere", "data.path={tmp}"], ["data.tokenizer", "/nowhere"]),
    ],
)
def test_a_mistake_is_one_line(sample, tmp_path, job, arguments, words):
    (tmp_path / "empty.jsonl").touch()
    places = {"blocks": sample, "tmp": tmp_path / "out", "empty": tmp_path / "empty.jsonl"}
    code, output = run_job(job, *[a.format(**places) for a in arguments], timeout=60)
    lines = [line for line in output.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), output
    assert all(word.format(**places) in lines[0] for word in words), output
