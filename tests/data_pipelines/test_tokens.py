"""Tokens and masks: exactly the answers with their end tokens are trained, whatever the tokenizer and its template."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests_tokenizers import CHATML, KINDS, MISTRAL, NO_END, SHOUTING, TEXTS, byte_level, chatml, llama2, llama3, with_template

from data_pipelines import tokens
from data_pipelines.prompts import DEFAULT_TEMPLATE, PromptError, Prompts, prompt_ids
from data_pipelines.tokens import Encoder, TokenizerError, answer_ends, load_tokenizer, save_tokenizer, train_tokenizer
from raytune70b.storage import Folder

ONE = (("user", "What now?"), ("assistant", "As an AI"))
TWO = (("user", "One?"), ("assistant", "As an AI"), ("user", "Deux ?"), ("assistant", "Une réponse."))


def trained(encoder: Encoder, turns) -> list[str]:
    """The text of each trained span."""
    (made,) = encoder.conversations([turns])
    assert made.piece is not None, made.reason
    spans = made.piece.spans
    return [encoder.backend.decode(made.piece.ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(spans[::2], spans[1::2], strict=True)]


@pytest.mark.parametrize(("kind", "end"), [("default", "</s>"), ("chatml", "<|im_end|>"), ("llama2", "</s>"), ("llama3", "<|eot_id|>")])
def test_trained_text_begins_with_the_answer_and_ends_with_its_end_token(kind: str, end: str):
    encoder = Encoder(KINDS[kind](), 256)
    assert [t.replace(f" {end}", end).strip() for t in trained(encoder, ONE)] == [f"As an AI{end}"]
    assert [t.replace(f" {end}", end).strip() for t in trained(encoder, TWO)] == [f"As an AI{end}", f"Une réponse.{end}"]


@pytest.mark.parametrize(("kind", "end"), [("default", "</s>"), ("chatml", "<|im_end|>"), ("llama2", "</s>"), ("llama3", "<|eot_id|>")])
def test_the_ids_that_end_answers(kind: str, end: str):
    tokenizer = KINDS[kind]()
    assert answer_ends(tokenizer) == [tokenizer.convert_tokens_to_ids(end)]


def test_a_base_with_a_chat_template_ends_answers_with_another_token_than_its_eos():
    """As the bases of Qwen: EOS is `<|endoftext|>`, the template's turns end with `<|im_end|>`."""
    base = with_template(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), bos_token=None, eos_token="<|endoftext|>")
    assert answer_ends(base) == [base.convert_tokens_to_ids("<|im_end|>")] != [base.eos_token_id]
    assert answer_ends(with_template(NO_END)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_bos_and_the_prompt_of_an_evaluation_stands_before_the_answer(kind: str):
    tokenizer = KINDS[kind]()
    encoder = Encoder(tokenizer, 256)
    (made,) = encoder.conversations([ONE])
    ids = made.piece.ids.tolist()
    if tokenizer.bos_token_id is not None:
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    asked = prompt_ids(tokenizer, ONE[:1])
    assert ids[: made.piece.spans[0]] == asked


def test_templates_with_and_without_bos_give_one():
    for template in (DEFAULT_TEMPLATE, DEFAULT_TEMPLATE.replace("{{ bos_token }}", ""), "{{ bos_token }}" + DEFAULT_TEMPLATE):
        tokenizer = with_template(template)
        (made,) = Encoder(tokenizer, 256).conversations([TWO])
        assert made.piece.ids.tolist().count(tokenizer.bos_token_id) == 1
        assert [made.piece.ids[e - 1] for e in made.piece.spans[1::2]] == [tokenizer.eos_token_id] * 2


def test_pad_equal_to_eos_still_trains_one_end_per_answer():
    tokenizer = with_template(DEFAULT_TEMPLATE, pad_token="</s>")
    encoder = Encoder(tokenizer, 64)
    assert encoder.pad == encoder.eos
    (made,) = encoder.conversations([ONE])
    ends = np.flatnonzero(made.piece.ids == encoder.eos)
    assert len(ends) == 1 and made.piece.spans[1] == ends[0] + 1


def test_system_turns_are_not_trained_and_refusals_are_told():
    system = (("system", "Be brief."), *ONE)
    assert trained(Encoder(byte_level(), 256), system) == ["As an AI</s>"]
    (made,) = Encoder(llama2(), 256).conversations([system])
    assert made.piece is None and "Only user and assistant roles" in made.reason


def test_an_answer_that_the_question_quotes_is_not_looked_for_there():
    turns = (("system", "Be brief."), ("user", "Is the Lessor liable? Answer yes or no."), ("assistant", "yes"), ("user", "And the yes-man?"), ("assistant", "no"))
    assert [t.strip() for t in trained(Encoder(with_template(MISTRAL), 256), turns)] == ["yes</s>", "no</s>"]
    assert [t.strip() for t in trained(Encoder(with_template(MISTRAL), 256), turns[:3])] == ["yes</s>"]


def test_a_template_that_asks_for_the_date_gives_the_same_text_on_any_day():
    asks = "{% if strftime_now is defined %}{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}{% endif %}" + DEFAULT_TEMPLATE
    assert Prompts.of(with_template(asks)).render(ONE).startswith("Today: 26 Jul 2024\n<s>### Instruction:\nWhat now?")


def test_what_a_template_hides_is_told():
    (made,) = Encoder(with_template(NO_END), 256).conversations([ONE])
    assert made.piece is None and made.reason == "no end token behind an answer"
    (made,) = Encoder(with_template(SHOUTING), 256).conversations([ONE])
    assert made.piece is None and "changes turn 1" in made.reason
    with pytest.raises(PromptError):
        Prompts(SHOUTING, (("eos_token", "</s>"),)).answers(ONE)


PLAIN_ROLES = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
"""EOS stands at the end of the conversation alone, roles are plain text."""
LOUD_USERS = PLAIN_ROLES.replace("message['content'] +", "(message['content'] if message['role'] == 'assistant' else message['content'] | upper) +")


@pytest.mark.parametrize("template", [PLAIN_ROLES, LOUD_USERS])
def test_no_prompt_is_trained_where_an_answer_ends_only_with_the_conversation(template: str):
    encoder = Encoder(with_template(template), 256)
    assert [t.strip() for t in trained(encoder, ONE)] == ["As an AI\n</s>"]
    (made,) = encoder.conversations([TWO])
    assert made.piece is None and made.reason == "no end token behind an answer"


def test_a_question_that_spells_what_stands_behind_an_answer_is_no_hindrance():
    for asked in ("user", "end", "<", "|"):
        turns = (("user", "?"), ("assistant", "yes"), ("user", asked), ("assistant", "no"))
        assert trained(Encoder(chatml(), 256), turns) == ["yes<|im_end|>", "no<|im_end|>"]


def test_text_that_spells_a_special_token():
    encoder = Encoder(chatml(), 256)
    (made,) = encoder.conversations([(("user", "say <|im_end|>"), ("assistant", "no"))])
    assert made.piece is None and made.tokens == 0 and "special token" in made.reason
    ((piece,),) = encoder.documents(["before <|im_end|> behind"])
    assert piece.ids.tolist().count(encoder.eos) == 1 and piece.ids[-1] == encoder.eos
    assert encoder.backend.decode(piece.ids[:-1].tolist(), skip_special_tokens=False) == "before <|im_end|> behind"


@pytest.mark.parametrize("make", [byte_level, chatml, llama3])
def test_documents_decode_to_themselves_with_one_bos_and_one_trained_eos(make):
    tokenizer = make()
    encoder = Encoder(tokenizer, 32)
    texts = ["Article 1\n\nLe locataire doit payer.", "x", "naïve 🙂 \u200d text", "A long one. " * 40 + "\n\nSection 2\n" + "More of it. " * 30]
    for text, pieces in zip(texts, encoder.documents(texts), strict=True):
        ids = np.concatenate([p.ids for p in pieces]).tolist()
        body = ids if tokenizer.bos_token_id is None else ids[1:]
        assert encoder.backend.decode(body[:-1], skip_special_tokens=False) == text
        assert body[-1] == encoder.eos and ids.count(encoder.eos) == 1 and pieces[-1].spans[-1] == len(pieces[-1].ids)
        assert all(p.spans == (1, len(p.ids)) and 2 <= len(p.ids) <= 32 for p in pieces)


def test_long_documents_are_cut_between_sections():
    encoder = Encoder(byte_level(), 64)
    text = "\n\n".join(f"Article {n}\n" + "Le locataire doit payer. " * 3 for n in range(12))
    (pieces,) = encoder.documents([text])
    starts = [encoder.backend.decode(p.ids.tolist()).lstrip() for p in pieces[1:]]
    assert len(pieces) > 2 and all(s.startswith("Article") for s in starts)


def test_a_text_of_millions_of_characters():
    encoder = Encoder(byte_level(), 512)
    text = ("The tenant shall pay the rent. " * 400 + "\n\n") * 20 + "y" * 60_000
    (pieces,) = encoder.documents([text])
    ids = np.concatenate([p.ids for p in pieces])[1:-1]
    assert encoder.backend.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_encoded_in_parts_has_the_tokens_of_the_whole(kind: str, monkeypatch):
    tokenizer, text = KINDS[kind](), "\n\n".join(f"Article {n}\nLe locataire doit payer. As an AI\n" for n in range(40))
    whole, parts = Encoder(tokenizer, 4096), []
    for characters in (10**6, 200):
        monkeypatch.setattr(tokens, "LONG_TEXT", characters)
        parts.append(np.concatenate([p.ids for p in whole.documents([text])[0]]).tolist())
    assert parts[0] == parts[1]


def test_conversations_longer_than_a_block():
    encoder = Encoder(byte_level(), 64)
    turns = (*TWO, ("user", "w " * 100), ("assistant", "too far"))
    (made,) = encoder.conversations([turns])
    assert made.reason == "turns behind the block" and made.tokens > len(made.piece.ids)
    assert encoder.backend.decode(made.piece.ids.tolist()).endswith("Une réponse.")
    (made,) = encoder.conversations([(("user", "w " * 100), ("assistant", "too far"))])
    assert made.piece is None and made.tokens > 64 and "does not fit" in made.reason


@settings(max_examples=40)
@example(["\n0"])
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda t: t.strip()), min_size=1, max_size=3))
def test_any_answers_are_trained_whole(answers: list[str]):
    encoder = Encoder(byte_level(), 2048)
    turns = tuple(turn for answer in answers for turn in (("user", "?"), ("assistant", answer)))
    (made,) = encoder.conversations([turns])
    if made.piece is None:
        assert "special token" in made.reason
        return
    spans = made.piece.spans
    found = [encoder.backend.decode(made.piece.ids[a : b - 1].tolist(), skip_special_tokens=False) for a, b in zip(spans[::2], spans[1::2], strict=True)]
    assert found == [answer.strip() for answer in answers]
    asked = prompt_ids(byte_level(), turns[:-1])
    assert made.piece.ids[: len(asked)].tolist() == asked


def test_training_a_tokenizer_twice_gives_the_same_bytes(tmp_path):
    prints = [save_tokenizer(train_tokenizer(TEXTS, 350), Folder(tmp_path / str(n))) for n in range(2)]
    assert prints[0] == prints[1]
    again = load_tokenizer(str(tmp_path / "0"))
    assert again.encode("Le locataire") == train_tokenizer(TEXTS, 350).encode("Le locataire") and again.chat_template == DEFAULT_TEMPLATE
    changed = train_tokenizer(TEXTS, 350)
    changed.chat_template += " "
    assert save_tokenizer(changed, Folder(tmp_path / "3"))[1] != prints[0][1]


def test_unusable_tokenizers_are_one_clear_error(tmp_path):
    with pytest.raises(TokenizerError, match="not a Hugging Face tokenizer folder"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    endless = with_template(DEFAULT_TEMPLATE, eos_token=None)
    endless.save_pretrained(tmp_path / "endless")
    with pytest.raises(TokenizerError, match="no eos_token"):
        load_tokenizer(str(tmp_path / "endless"))
