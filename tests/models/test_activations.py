"""Activations must not depend on where a row stands, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from drawbar.models.activations import SHARE, ExactActivation, replace_activations, shares_are_whole


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.Sigmoid()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_in_any_company(function: nn.Module, dtype: torch.dtype) -> None:
    rows = (torch.randn((256, 11008), generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    exact = ExactActivation(function)
    whole = exact(rows)
    for count in (1, 2, 16, 96):
        for start in range(0, 256 - count + 1, count):
            assert torch.equal(exact(rows[start : start + count].clone()), whole[start : start + count])
    torch.testing.assert_close(whole, function(rows))


def test_replaces_what_has_no_parameters_once() -> None:
    model = nn.ModuleDict({"act": nn.SiLU(), "learned": nn.PReLU(), "linear": nn.Linear(2, 2)})
    replace_activations(model)
    replace_activations(model)
    assert isinstance(model["act"], ExactActivation) and isinstance(model["act"].function, nn.SiLU)
    assert isinstance(model["learned"], nn.PReLU)


def test_strided_input_is_taken() -> None:
    rows = torch.randn(4, 2 * SHARE)[:, ::2]
    torch.testing.assert_close(ExactActivation(nn.SiLU())(rows), nn.functional.silu(rows))


def test_whole_shares_are_computed_in_one_call() -> None:
    assert shares_are_whole(SHARE, 64)
    assert shares_are_whole(128 * 14336, 2)
    assert not shares_are_whole(128 * 11008, 3)
    assert not shares_are_whole(SHARE + 64, 2)
