from __future__ import annotations

import resource

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from raytune70b.blocks.batch import decode
from raytune70b.blocks.manifest import block_schema
from raytune70b.model.loss import LogitShape, attach_loss, linear_cross_entropy, logits_error, loss_sum
from tests import reference
from tests.distributed import run


@pytest.mark.parametrize("chunk", [1, 3, 8, 11, 100])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.3), LogitShape(cap=2.0), LogitShape(scale=1.7, cap=5.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_equal_the_plain_loss(chunk, shape, bias):
    torch.manual_seed(chunk)
    tensors = [torch.randn(11, 16), torch.randn(37, 16), torch.randn(37) if bias else None]
    labels = torch.randint(0, 37, (11,))
    labels[[0, 4, 10]] = -100
    found = []
    for chunk_tokens in (0, chunk):
        hidden, weight, b = (None if t is None else t.clone().requires_grad_() for t in tensors)
        loss = linear_cross_entropy(hidden, weight, b, labels, chunk_tokens, shape)
        (loss / 8).backward()
        found.append([loss.detach(), *(t.grad for t in (hidden, weight, b) if t is not None)])
    plain = F.cross_entropy(shape.apply(F.linear(*tensors)), labels, ignore_index=-100, reduction="sum")
    assert found[0][0] == pytest.approx(plain.item(), rel=1e-6)
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_frozen_head_and_validation_make_no_needless_gradients():
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8)
    loss = linear_cross_entropy(hidden, weight, None, torch.arange(5), 2)
    assert loss.grad_fn.gradients[1] is None
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, None, torch.arange(5), 2).item() == pytest.approx(loss.item(), rel=1e-6)


def test_nothing_trained_is_a_loss_of_zero_and_no_gradient():
    hidden = torch.randn(6, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(9, 8), None, torch.full((6,), -100), 4)
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any()


@pytest.mark.parametrize("chunk", [0, 2])
def test_micro_batches_of_one_and_three_give_the_gradient_of_the_whole_batch(chunk):
    x, y = torch.tensor([[1.0, 0], [0, 1], [0, 1], [0, 1]]), torch.tensor([0, 1, 1, 0])
    weight = torch.zeros(2, 2, requires_grad=True)
    for part in (slice(0, 1), slice(1, 4)):
        (linear_cross_entropy(x[part], weight, None, y[part], chunk) / 4).backward()
    torch.testing.assert_close(weight.grad.T, torch.tensor([[-0.125, 0.125], [0.125, -0.125]]))


def tiny_model(name: str = "llama"):
    from transformers import AutoConfig, AutoModelForCausalLM

    values = reference.config_values(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), vocab_size=50, **values), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    attach_loss(model)
    return model


def block(input_ids: list[int], ends: list[int], spans: list[int]) -> dict[str, torch.Tensor]:
    row = {"block_id": 0, "input_ids": input_ids, "document_ends": ends, "trained_spans": spans}
    arrays = decode(pa.Table.from_pylist([row], schema=block_schema(len(input_ids))), len(input_ids))
    return {name: torch.tensor(a, dtype=torch.int64) for name, a in arrays.items()}


@pytest.mark.parametrize("chunk", [0, 3])
def test_documents_of_three_and_five_tokens_cost_packed_what_they_cost_alone(chunk):
    model, ids = tiny_model(), [4, 8, 15, 16, 23, 42, 7, 9]
    packed = block(ids, [3, 8], [1, 3, 4, 8])
    alone = sum(F.cross_entropy(model(input_ids=torch.tensor([d])).logits[0, :-1], torch.tensor(d[1:]), reduction="sum") for d in (ids[:3], ids[3:]))
    assert loss_sum(model, packed, chunk).item() == pytest.approx(alone.item(), abs=1e-5)


def test_the_first_token_of_a_document_and_padding_are_not_trained():
    two = block([1, 2, 3, 4, 5, 6], [3, 6], [1, 3, 4, 6])
    assert two["labels"].tolist() == [[2, 3, -100, 5, 6, -100]] and (two["labels"] != -100).sum() == 4
    padded = block([1, 2, 0, 0, 0, 0, 0, 0], [2], [1, 2])
    model = tiny_model()
    expected = -model(input_ids=torch.tensor([[1]])).logits[0, 0].log_softmax(0)[2]
    assert loss_sum(model, padded, 4).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_loss_knows_what_the_model_does_to_its_logits(name):
    model, batch = tiny_model(name), block([1, 2, 3, 4, 5, 6], [3, 6], [1, 3, 4, 6])
    assert logits_error(model.eval(), batch) < 1e-6
    forward = type(model).forward

    class Scaled(type(model)):
        def forward(self, **inputs):
            out = forward(self, **inputs)
            out.logits = out.logits * 3
            return out

    model.__class__ = Scaled
    assert logits_error(model, batch) > 0.5


def peak_megabytes(rank: int, world_size: int, chunk_tokens: int) -> float:
    """Growth of this process's memory by one loss and its gradients at a vocabulary of 131,072."""
    hidden, weight = torch.randn(1024, 64, requires_grad=True), (torch.randn(131072, 64) * 0.02).requires_grad_()
    labels = torch.randint(0, 131072, (1024,))
    linear_cross_entropy(hidden[:8], weight, None, labels[:8], 4).backward()  # thread pools and kernels
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear_cross_entropy(hidden, weight, None, labels, chunk_tokens).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_the_chunked_loss_needs_at_most_a_fifth_of_the_memory():
    chunked, whole = run(peak_megabytes, 1, 64)[0], run(peak_megabytes, 1, 0)[0]
    assert whole > 1000, "the full logits alone are 512 MB, and autograd keeps more than one copy"
    assert chunked <= 0.2 * whole, f"{chunked:.0f} MB against {whole:.0f} MB"
