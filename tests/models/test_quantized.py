"""Int4: bounded error, a kernel that computes what the codes say, and the memory that was promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drawbar.errors import BudgetError, ConfigurationError
from drawbar.models.checkpoint import OpenCheckpoint
from drawbar.models.quantized import GROUP, Int4Linear, fits_int4, int4_bytes, quantize_groups, quantize_module
from drawbar.models.resident import ResidentModel, resident_bytes
from tests.models.tiny import make_checkpoint


def weights(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(0))


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    codes, scales, middles = quantize_groups(weight)
    groups = (codes.view(len(weight), -1, GROUP) - 8) * scales[..., None] + middles[..., None]
    return groups.view(weight.shape)


def test_no_weight_is_off_by_more_than_half_a_level() -> None:
    weight = weights(48, 192)
    codes, scales, _ = quantize_groups(weight)
    assert int(codes.min()) >= 0 and int(codes.max()) <= 15
    error = (dequantised(weight) - weight).view(48, -1, GROUP).abs().amax(dim=-1)
    assert bool((error <= scales / 2 * 1.001).all())


def test_constant_groups_are_kept() -> None:
    weight = torch.full((16, GROUP), 0.5)
    torch.testing.assert_close(dequantised(weight), weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(16, 64, 1), (48, 192, 5), (128, 256, 33)])
def test_the_kernel_computes_the_product_of_the_codes(outputs: int, inputs: int, rows: int, bias: bool) -> None:
    weight = weights(outputs, inputs).bfloat16()
    offset = torch.randn(outputs).bfloat16() if bias else None
    given = torch.randn((2, rows, inputs)).bfloat16()
    result = Int4Linear(weight, offset)(given)
    expected = given.float() @ dequantised(weight).t() + (0 if offset is None else offset.float())
    assert result.shape == (2, rows, outputs) and result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, atol=0.02 * inputs**0.5, rtol=0.02)


@pytest.mark.parametrize(("shape", "fits"), [((16, 64), True), ((16, 63), False), ((15, 64), False), ((8,), False)])
def test_other_shapes_are_left_alone(shape: tuple[int, ...], fits: bool) -> None:
    assert fits_int4(torch.empty(shape)) is fits
    if len(shape) == 2:
        holder = nn.Sequential(nn.Linear(shape[1], shape[0]))
        quantize_module(holder)
        assert isinstance(holder[0], Int4Linear) is fits


def test_bytes_of_a_weight() -> None:
    layer = Int4Linear(weights(64, 256).bfloat16())
    assert sum(buffer.nbytes for buffer in layer.buffers()) == int4_bytes(64, 256)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resident_model_holds_what_was_promised(architecture: str, tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(architecture, tmp_path, tie_word_embeddings=tied)
    for quantize in (None, "int4"):
        promised = resident_bytes(OpenCheckpoint.open(folder), quantize)
        assert ResidentModel.from_pretrained(folder, quantize=quantize).nbytes == pytest.approx(promised, rel=0.02)
        with pytest.raises(BudgetError, match="holding it takes"):
            ResidentModel.from_pretrained(folder, quantize=quantize, memory=promised - 1)
    with pytest.raises(ConfigurationError, match="int3"):
        ResidentModel.from_pretrained(folder, quantize="int3")


MEASURE = """
import resource, sys
from drawbar.models.checkpoint import OpenCheckpoint
from drawbar.models.resident import ResidentModel
checkpoint = OpenCheckpoint.open(sys.argv[1])
checkpoint.measure_buckets()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = ResidentModel.load(checkpoint, "int4")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, model.nbytes // 1024)
"""


def test_quantising_never_holds_the_model_unquantised(tmp_path: Path) -> None:
    folder = make_checkpoint(
        "llama", tmp_path, hidden_size=512, intermediate_size=1024, num_hidden_layers=48, head_dim=128
    )
    whole = (folder / "model.safetensors").stat().st_size // 1024
    assert whole > 200_000
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], check=True, capture_output=True, text=True)
    grown, held = map(int, done.stdout.split())
    assert grown < held + 50_000 < whole / 1.5
