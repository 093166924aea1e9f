"""The streamed model: any memory split gives the same bits, and every failure leaves it usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drawbar.errors import BudgetError, ConfigurationError, PromptError, ReadError
from drawbar.models.base import Rows
from drawbar.models.checkpoint import OpenCheckpoint
from drawbar.models.resident import ResidentModel
from drawbar.models.streamed import StreamedModel, _fixed_bytes, _layer_sizes
from tests.models.tiny import edit_tensors, make_checkpoint, run, tokens, tree_of

Maker = Callable[..., Path]
Loader = Callable[..., ResidentModel]
CONTEXT = 64


def budgets(folder: Path) -> tuple[int, int]:
    """The least budget, and what one layer more takes."""
    checkpoint = OpenCheckpoint.open(folder)
    return StreamedModel.least_budget(checkpoint, CONTEXT), _layer_sizes(checkpoint)[0].held


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_every_split_gives_the_bits_of_the_resident_model(
    architecture: str, checkpoint: Maker, resident: Loader
) -> None:
    folder = checkpoint(architecture, torch.bfloat16)
    least, _ = budgets(folder)
    model = resident(architecture, torch.bfloat16)
    rows = Rows.of(tokens(20), tree_of((-1, -1, 0, 2)))
    expected = run(model, rows, model.new_cache(64))
    seen, budget, step = set(), least, 1 << 14
    everything = least + 10 * sum(size.staged + size.copied for size in _layer_sizes(OpenCheckpoint.open(folder)))
    while budget <= everything and 0 not in seen:
        with StreamedModel.from_pretrained(folder, memory=budget, context=CONTEXT) as streamed:
            placed = len(streamed.placement.streamed)
            if placed not in seen:
                cache = streamed.new_cache(64)
                for _ in range(2):  # a second pass wraps around
                    assert torch.equal(run(streamed, rows, cache), expected)
                    cache.truncate(0)
            seen.add(placed)
            assert streamed.placement.total <= budget
        budget += step
    assert {0, 4} <= seen and len(seen) >= 3


def test_one_slot_is_enough_and_less_is_refused_with_a_size_that_works(checkpoint: Maker) -> None:
    folder = checkpoint("llama", torch.bfloat16)
    least, _ = budgets(folder)
    with StreamedModel.from_pretrained(folder, memory=least, context=CONTEXT) as model:
        assert model.placement.slots == 1
        run(model, Rows(tokens(5)), model.new_cache(8))
    with pytest.raises(BudgetError, match=r"at least \d+MiB") as caught:
        StreamedModel.from_pretrained(folder, memory=least - 1, context=CONTEXT)
    told = str(caught.value).split("at least ")[1].split(",")[0]
    StreamedModel.from_pretrained(folder, memory=told, context=CONTEXT).close()


def test_counters_tell_what_a_pass_reads(checkpoint: Maker) -> None:
    folder = checkpoint("llama", torch.bfloat16)
    with StreamedModel.from_pretrained(folder, memory=budgets(folder)[0], context=CONTEXT) as model:
        cache = model.new_cache(16)
        for token in tokens(6):
            run(model, Rows((token,)), cache)
        assert model.passes == 6
        layers = sum(entry.nbytes for unit in OpenCheckpoint.open(folder).layer_units() for entry in unit.tensors)
        # Aligned reads bring a little more; read-ahead is at most one pass further.
        assert 6 * layers <= model.counters().bytes_read <= 7 * model.placement.bytes_per_pass
    with StreamedModel.from_pretrained(folder, memory="1GiB", context=CONTEXT) as model:
        assert model.counters().bytes_read == 0 and model.placement.bytes_per_pass == 0


def test_a_read_that_fails_in_the_middle_of_a_pass_leaves_caches_and_model_usable(
    checkpoint: Maker, resident: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama", torch.bfloat16)
    with StreamedModel.from_pretrained(folder, memory=budgets(folder)[0], context=CONTEXT) as model:
        cache, read, failing = model.new_cache(64), model._reader.read_into, [False]

        def flaky(buffer: memoryview, file: Path, offset: int, needed: int) -> None:
            if failing[0] and offset > file.stat().st_size // 2:
                raise ReadError(f"{file}: the disk is gone at {offset}")
            read(buffer, file, offset, needed)

        monkeypatch.setattr(model._reader, "read_into", flaky)
        run(model, Rows(tokens(10)), cache)
        failing[0] = True
        tree = Rows.of((), tree_of((-1, 0, 0)))

        def passes() -> None:
            for _ in range(3):  # what was read ahead may serve a pass
                run(model, tree, cache)
                cache.keep(())

        with pytest.raises(ReadError, match="the disk is gone"):
            passes()
        failing[0] = False
        assert (cache.context_length, cache.length) == (10, 10)
        reference = resident("llama", torch.bfloat16)
        other = reference.new_cache(64)
        run(reference, Rows(tokens(10)), other)
        assert torch.equal(run(model, tree, cache), run(reference, tree, other))


def test_closing_twice_is_fine_and_a_closed_model_says_so(checkpoint: Maker) -> None:
    folder = checkpoint("llama", torch.bfloat16)
    model = StreamedModel.from_pretrained(folder, memory=budgets(folder)[0], context=CONTEXT)
    cache = model.new_cache(8)
    model.close()
    model.close()
    with pytest.raises(ConfigurationError, match="closed"):
        run(model, Rows((5,)), cache)
    assert cache.length == 0


def test_what_does_not_fit_is_refused(checkpoint: Maker, resident: Loader) -> None:
    model = resident("llama", torch.bfloat16)
    cache = model.new_cache(8)
    with pytest.raises(PromptError, match="position 512 lies beyond"):
        run(model, Rows((5,) * 513), cache)
    assert cache.length == 0
    with StreamedModel.from_pretrained(checkpoint("llama", torch.bfloat16), memory="1GiB", context=100) as streamed:
        held = streamed.new_cache(300)
        with pytest.raises(BudgetError, match="300 of requests under way"):
            streamed.new_cache(100)
        del held
        streamed.new_cache(356)
        with pytest.raises(BudgetError, match="planned for 356"):
            streamed.new_cache(357)


def test_batches_that_cannot_be_are_refused_before_any_cache_is_written(resident: Loader) -> None:
    model = resident("llama", torch.bfloat16)
    first, second = model.new_cache(8), model.new_cache(8)
    run(model, Rows.of((5,), tree_of((-1,))), second)
    bad: list[tuple[list[Rows], list[object]]] = [
        ([], []),
        ([Rows((5,))], []),
        ([Rows((5,)), Rows((6,))], [first, first]),
        ([Rows((5,)), Rows(())], [first, second]),
        ([Rows((5,)), Rows((6,))], [first, second]),
        ([Rows((5,))], [object()]),
    ]
    for batch, caches in bad:
        with pytest.raises(ConfigurationError):
            model.forward(batch, caches)  # type: ignore[arg-type]
        assert (first.length, second.length) == (0, 2)


def test_two_models_at_once(checkpoint: Maker, resident: Loader) -> None:
    folders = [checkpoint(name, torch.bfloat16) for name in ("llama", "qwen3")]
    models = [StreamedModel.from_pretrained(f, memory=budgets(f)[0], context=CONTEXT) for f in folders]
    caches = [model.new_cache(32) for model in models]
    reference = [resident(name, torch.bfloat16) for name in ("llama", "qwen3")]
    others = [model.new_cache(32) for model in reference]
    for token in tokens(8):
        for model, cache, twin, other in zip(models, caches, reference, others, strict=True):
            assert torch.equal(run(model, Rows((token,)), cache), run(twin, Rows((token,)), other))
    for model in models:
        model.close()


def test_nan_weights_come_out_as_nan(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"].fill_(torch.nan)

    edit_tensors(tmp_path, spoil)
    with StreamedModel.from_pretrained(tmp_path, memory=budgets(tmp_path)[0], context=CONTEXT) as model:
        assert run(model, Rows((5, 6)), model.new_cache(8)).isnan().all()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_caches_take_what_was_planned(architecture: str, checkpoint: Maker, resident: Loader) -> None:
    from drawbar.models.transformer import cache_bytes_per_row

    model = resident(architecture, torch.bfloat16)
    cache = model.new_cache(64)
    run(model, Rows((5,)), cache)
    assert cache.nbytes == 64 * cache_bytes_per_row(model.config, torch.bfloat16)
    assert _fixed_bytes(OpenCheckpoint.open(checkpoint(architecture, torch.bfloat16)), 64) > cache.nbytes
