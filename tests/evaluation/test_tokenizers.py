"""Two tokenizers are told apart by what they do to text, in one line with both values."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from data_pipelines.tokens import save_tokenizer, train_tokenizer
from raytune70b.config import UserError
from raytune70b.evaluation.tokenizers import check_tokenizer, difference
from raytune70b.storage import Folder
from tests.export.run_folders import TEXTS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`same` twice, `smaller` of another size, `other` of the same size from other texts."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, texts, size in (("same", TEXTS, 320), ("again", TEXTS, 320), ("smaller", TEXTS, 300), ("other", [t[::-1] for t in TEXTS], 320)):
        save_tokenizer(train_tokenizer(texts * 40, size), Folder(root / name))
    return root


def load(folder):
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def test_the_same_tokenizer_has_no_difference(folders):
    assert difference(load(folders / "again"), load(folders / "same")) is None


def test_a_token_more_is_none_either(folders):
    padded = load(folders / "again")
    padded.add_special_tokens({"pad_token": "<pad>"})
    assert difference(padded, load(folders / "same")) is None and difference(load(folders / "same"), padded) is None


@pytest.mark.parametrize("name", ["smaller", "other"])
def test_another_one_is_told_with_both_values(folders, name):
    with pytest.raises(UserError) as caught:
        check_tokenizer("evaluation.model", folders / name, "data/mine", load(folders / "same"))
    line = str(caught.value)
    assert line.startswith("evaluation.model: ") and str(folders / name) in line and "data.path=data/mine" in line and "\n" not in line


def test_the_end_of_an_answer_counts(folders):
    other = load(folders / "again")
    other.eos_token = other.convert_ids_to_tokens(5)
    assert difference(other, load(folders / "same"))[0] == "the token that ends an answer differs"


def test_a_model_folder_without_a_tokenizer_takes_the_data_sets(tmp_path, folders):
    check_tokenizer("evaluation.base", tmp_path, "data/mine", load(folders / "same"))
