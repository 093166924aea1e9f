"""Bits: what a pass computes for a row depends on the row's ancestors and on nothing else in the pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drawbar.models.base import Rows
from drawbar.models.resident import ResidentModel
from drawbar.models.streamed import StreamedModel
from tests.models.tiny import (
    ARCHITECTURES,
    edit_tensors,
    leaves,
    make_checkpoint,
    one_by_one,
    reference,
    run,
    tokens,
    tree_of,
)

Loader = Callable[..., ResidentModel]
DTYPES = [torch.bfloat16, torch.float32]
EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float32"])
PARENTS = (-1, -1, 0, 0, 1, 2, 2, 5, 7, 7, 4, 8, 11, 12)


@EVERY
@BOTH
def test_a_tree_in_one_pass_has_the_logits_of_its_paths(
    architecture: str, dtype: torch.dtype, resident: Loader
) -> None:
    model = resident(architecture, dtype)
    prompt, tree = tokens(19), tree_of(PARENTS)
    cache = model.new_cache(64)
    logits = run(model, Rows.of(prompt, tree), cache)
    single = model.new_cache(64)
    for token in prompt:
        alone = run(model, Rows((token,)), single)[0]
    assert torch.equal(logits[0], alone)
    kept = leaves(tree)[-1]
    for leaf in leaves(tree):  # the one that is kept comes last
        single.truncate(len(prompt))
        for node in tree.path(leaf):
            alone = run(model, Rows((tree.tokens[node],)), single)[0]
            assert torch.equal(logits[1 + node], alone), f"node {node} of the path to {leaf}"
    # What is kept is as if it had come one by one.
    cache.keep(tree.path(kept))
    for token in tokens(3, seed=9):
        assert torch.equal(run(model, Rows((token,)), cache)[0], run(model, Rows((token,)), single)[0])


@EVERY
@BOTH
def test_prompts_of_several_slices_and_batches_change_nothing(
    architecture: str, dtype: torch.dtype, resident: Loader
) -> None:
    model = resident(architecture, dtype)
    prompt, tree = tokens(270), tree_of((-1, 0, 0, 2))
    whole = model.new_cache(512)
    logits = run(model, Rows.of(prompt, tree), whole)
    cut = model.new_cache(512)
    for first in range(0, 270, 97):
        last = run(model, Rows(prompt[first : first + 97]), cut)
    assert torch.equal(last[-1], logits[0])
    # Node by node along the path 0, 2, 3.
    for node in (0, 2, 3):
        assert torch.equal(run(model, Rows((tree.tokens[node],)), cut)[0], logits[1 + node])
    other = tokens(11, seed=4)
    batch = [Rows.of(other, tree_of((-1, -1, 1))), Rows.of(prompt, tree)]
    together = model.forward(batch, [model.new_cache(64), model.new_cache(512)])
    assert torch.equal(together[0], run(model, batch[0], model.new_cache(64)))
    assert torch.equal(together[1], logits)


@EVERY
def test_streamed_resident_and_transformers_agree(
    architecture: str, checkpoint: Callable[..., Path], resident: Loader
) -> None:
    folder = checkpoint(architecture, torch.float32)
    model, theirs = resident(architecture, torch.float32), reference(folder)
    prompt = tokens(40)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    cache = model.new_cache(64)
    ours = [run(model, Rows((token,)), cache)[0] for token in prompt]
    torch.testing.assert_close(torch.stack(ours), expected, atol=2e-4, rtol=2e-4)
    with StreamedModel.from_pretrained(folder, memory="400MiB", context=64) as streamed:
        assert torch.equal(run(streamed, Rows(prompt), streamed.new_cache(64))[-1], ours[-1])
    generated = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    greedy, logits = [], ours[-1]
    for _ in generated:
        greedy.append(int(logits.argmax()))
        logits = run(model, Rows((greedy[-1],)), cache)[0]
    assert greedy == generated


@BOTH
def test_a_branch_that_is_not_finite_does_not_reach_the_others(dtype: torch.dtype, tmp_path: Path) -> None:
    """A token whose embedding is NaN ruins its own branch: its siblings and their children do not see it."""
    make_checkpoint("llama", tmp_path, dtype)
    tree, prompt = tree_of((-1, -1, 0, 1)), tokens(9)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][tree.tokens[0]] = torch.nan

    edit_tensors(tmp_path, spoil)
    model = ResidentModel.from_pretrained(tmp_path)
    logits = run(model, Rows.of(prompt, tree), model.new_cache(64))
    assert logits[[1, 3]].isnan().all()
    alone = one_by_one(model, (*prompt, tree.tokens[1], tree.tokens[3]))
    assert torch.equal(logits[0], alone[-3])
    assert torch.equal(logits[2], alone[-2]) and torch.equal(logits[4], alone[-1])


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.float32), ("gemma2", torch.bfloat16), ("qwen3_moe", torch.float32), ("gpt_oss", torch.float32)],
)
def test_with_any_number_of_threads_a_row_is_the_same_wherever_it_stands(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With three threads, a thread's share of a wide activation ends in the middle of a vector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sizes = {"intermediate_size": 11008, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
        if architecture == "qwen3_moe":
            sizes["moe_intermediate_size"] = 2752
        folder = make_checkpoint(architecture, tmp_path, dtype, **sizes)
        model = ResidentModel.from_pretrained(folder)
        tree, prompt = tree_of([-1] + [0] * 59), tokens(1)
        logits = run(model, Rows.of(prompt, tree), model.new_cache(64))
        cache = model.new_cache(64)
        run(model, Rows((*prompt, tree.tokens[0])), cache)
        for node in range(1, len(tree)):  # only the rows where a share ends would differ
            assert torch.equal(run(model, Rows((tree.tokens[node],)), cache)[0], logits[1 + node])
            cache.truncate(2)
    finally:
        torch.set_num_threads(threads)
