from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlite.algorithms.divergence import Divergence
from rlite.backends.models.head_divergence import Head, TeacherTokens, linear_divergence
from rlite.errors import ConfigError

ROWS, VOCAB, WIDTH, TEACHER_WIDTH = 6, 23, 5, 7
DIRECTIONS = (0.0, 0.3, 0.5, 1.0)
SUPPORTS = ("full", "student_topk", "teacher_topk", "union")


def heads(dtype: torch.dtype = torch.float64, vocab: int = VOCAB, rows: int = ROWS) -> tuple[Head, Head]:
    """A student with gradients, and a teacher of another width."""
    generator = torch.Generator().manual_seed(rows)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student = Head(*(made(*shape).requires_grad_() for shape in ((rows, WIDTH), (vocab, WIDTH), (vocab,))))
    return student, Head(made(rows, TEACHER_WIDTH), made(vocab, TEACHER_WIDTH), made(vocab))


def chosen(log_s: Tensor, log_t: Tensor, divergence: Divergence) -> list[list[int]]:
    """Ids that the support tells apart in each row."""
    best = {name: x.topk(divergence.k, -1).indices.tolist() for name, x in (("s", log_s), ("t", log_t))}
    names = {"student_topk": "s", "teacher_topk": "t", "union": "st"}[divergence.support]
    return [sorted({token for name in names for token in best[name][row]}) for row in range(len(log_s))]


def of_distributions(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """The definition, of one row."""
    s, t = log_s.exp(), log_t.exp()
    if beta in (0, 1):
        return (t * (log_t - log_s)).sum() if beta == 0 else (s * (log_s - log_t)).sum()
    log_m = (beta * t + (1 - beta) * s).log()
    return beta * (t * (log_t - log_m)).sum() + (1 - beta) * (s * (log_s - log_m)).sum()


def with_rest(logprobs: Tensor, ids: list[int]) -> Tensor:
    others = [token for token in range(len(logprobs)) if token not in ids]
    return torch.cat([logprobs[ids], logprobs[others].logsumexp(-1, keepdim=True)])


def materialised(student: Head, teacher: Head, divergence: Divergence, temperature: float) -> Tensor:
    """Divergences by whole logits and autograd."""
    log_s, log_t = ((nn.functional.linear(*head) / temperature).log_softmax(-1) for head in (student, teacher))
    if divergence.support != "full":
        ids = chosen(log_s, log_t, divergence)
        rows = [[with_rest(x[row], ids[row]) for x in (log_s, log_t)] for row in range(len(log_s))]
    else:
        rows = [list(pair) for pair in zip(log_s, log_t, strict=True)]
    return torch.stack([of_distributions(*pair, divergence.beta) for pair in rows])


@pytest.mark.parametrize("block_size", [4, 23, 100])
@pytest.mark.parametrize(("support", "beta"), [*product(SUPPORTS, DIRECTIONS)])
def test_values_and_gradients_are_those_of_materialised_logits(support: Any, beta: float, block_size: int) -> None:
    student, teacher = heads()
    divergence, weights = Divergence(beta, support, 3), torch.arange(1.0, ROWS + 1, dtype=torch.float64)
    ours = linear_divergence(*student[:2], teacher, divergence, 0.7, bias=student.bias, block_size=block_size)
    expected = materialised(student, teacher, divergence, 0.7)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
    gradients = [torch.autograd.grad((weights * x).sum(), student) for x in (ours, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("support", "beta"), [*product(SUPPORTS, DIRECTIONS)])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(
    support: Any, beta: float, dtype: torch.dtype
) -> None:
    student, _ = heads(dtype, vocab=1000)
    teacher = Head(*(x.detach().clone() for x in student))
    found = linear_divergence(
        *student[:2], teacher, Divergence(beta, support, 8), 1.3, bias=student.bias, block_size=90
    )
    assert found.eq(0).all()
    assert all(x.eq(0).all() for x in torch.autograd.grad(found.sum(), student))


@pytest.mark.parametrize("beta", DIRECTIONS)
def test_tokens_of_a_server_count_as_those_of_a_head(beta: float) -> None:
    student, teacher = heads()
    log_t = nn.functional.linear(*teacher).log_softmax(-1)
    logprobs, ids = log_t.topk(4, -1)
    padded = torch.cat([ids, torch.full((ROWS, 1), -1)], -1), torch.cat([logprobs, torch.zeros(ROWS, 1)], -1)
    expected = linear_divergence(*student[:2], teacher, Divergence(beta, "teacher_topk", 4), bias=student.bias)
    for tokens in (TeacherTokens(ids, logprobs), TeacherTokens(*padded)):
        found = linear_divergence(*student[:2], tokens, Divergence(beta), bias=student.bias, block_size=5)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
        for pair in zip(
            *(torch.autograd.grad(x.sum(), student, retain_graph=True) for x in (found, expected)), strict=True
        ):
            torch.testing.assert_close(*pair, atol=1e-10, rtol=0)


def test_vocabularies_of_different_lengths_are_compared_where_both_have_ids() -> None:
    student, teacher = heads()
    short, longer = teacher.part(0, 19), Head(*(x.detach() for x in student)).part(0, 19)
    for ours, theirs in ((student, short), (student.part(0, 19), teacher)):
        found = linear_divergence(*ours[:2], theirs, Divergence(0.5), bias=ours.bias, block_size=4)
        expected = linear_divergence(*student.part(0, 19)[:2], short, Divergence(0.5), bias=student.bias[:19])
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    grad = torch.autograd.grad(linear_divergence(*student[:2], short, Divergence(), bias=student.bias).sum(), student)
    assert grad[1][19:].eq(0).all()
    assert grad[1][:19].abs().sum() > 0
    assert longer.weight.shape == (19, WIDTH)


def test_no_rows_have_no_divergence_and_an_empty_gradient() -> None:
    student, teacher = heads(rows=0)
    for support in SUPPORTS:
        found = linear_divergence(*student[:2], teacher, Divergence(1.0, support, 3))  # type: ignore[arg-type]
        assert found.shape == (0,)
        assert torch.autograd.grad(found.sum(), student[1])[0].eq(0).all()


def test_a_logit_of_minus_infinity_is_no_token() -> None:
    student, teacher = heads()
    bias = student.bias.detach().clone()
    bias[2] = -torch.inf
    banned = teacher._replace(bias=teacher.bias.clone().index_fill(0, torch.tensor([2]), -torch.inf))
    kept = [token for token in range(VOCAB) if token != 2]
    for beta in DIRECTIONS:
        found = linear_divergence(*student[:2], banned, Divergence(beta), bias=bias)
        fewer = Head(teacher.hidden, teacher.weight[kept], teacher.bias[kept])
        expected = linear_divergence(student.hidden, student.weight[kept], fewer, Divergence(beta), bias=bias[kept])
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    student, teacher = heads()
    with pytest.raises(ConfigError, match="6 rows of the teacher"):
        linear_divergence(student.hidden[:3], student.weight, teacher, Divergence())
    with pytest.raises(ConfigError, match="expected beta from 0 to 1"):
        Divergence(1.5)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        sizes = [x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.most = max([self.most, *sizes])
        return out


@pytest.mark.parametrize("support", ["full", pytest.param("union", marks=pytest.mark.nightly)])
def test_the_largest_tensor_is_a_block_and_not_the_logits(support: Any) -> None:
    student, teacher = heads(torch.float32, vocab=151_936, rows=200)
    logits = 200 * 151_936 * 4
    with Largest() as seen:
        found = linear_divergence(*student[:2], teacher, Divergence(1.0, support, 8))
        torch.autograd.grad(found.sum(), student[:2])
    assert seen.most < 0.04 * logits
