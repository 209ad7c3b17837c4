"""Unequal local batches: who gets which samples, and that the gradient is that of the global batch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.ddp import split_samples


def dealt(samples, batches, **options):
    """The batches of every rank."""
    return [list(qsync_opt.ShareSampler(samples, batches, rank=rank, **options)) for rank in range(len(batches))]


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_dealt_once_to_ranks_in_step(samples, batches, shuffle, drop_last, epoch):
    full, rest = divmod(samples, sum(batches))
    if drop_last and not full:
        with pytest.raises(ProblemError, match="make no global batch"):
            qsync_opt.ShareSampler(samples, batches, rank=0, drop_last=True)
        return
    samplers = [
        qsync_opt.ShareSampler(samples, batches, rank=rank, shuffle=shuffle, drop_last=drop_last)
        for rank in range(len(batches))
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    ranks = [list(sampler) for sampler in samplers]
    assert {len(own) for own in ranks} == {len(samplers[0])} == {full + bool(rest and not drop_last)}
    for step, sizes in enumerate(zip(*(map(len, own) for own in ranks), strict=True)):
        assert sizes == samplers[0].sizes(step)
        assert min(sizes) >= 1
        if step < full:
            assert sizes == tuple(batches)
    order = [i for step in zip(*ranks, strict=True) for i in itertools.chain.from_iterable(step)]
    if drop_last:
        assert len(order) == len(set(order)) == full * sum(batches)
    else:
        assert set(order) == set(range(samples))
        repeated = max(0, len(batches) - rest) if rest else 0
        assert len(order) == samples + repeated
        assert order[samples:] == (order[:samples] * len(batches))[:repeated]
    if not shuffle:
        assert order[:samples] == list(range(len(order[:samples])))


def test_the_samples_of_a_step_do_not_depend_on_the_shares():
    def steps(batches):
        return [[*itertools.chain.from_iterable(step)] for step in zip(*dealt(64, batches, seed=5), strict=True)]

    assert steps([4, 4]) == steps([7, 1]) == steps([8])


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = qsync_opt.ShareSampler(50, [50], rank=0)
    orders = []
    for seed, epoch in itertools.product((0, 1), (0, 1)):
        sampler.seed = seed
        sampler.set_epoch(epoch)
        orders.append(next(iter(sampler)))
        assert next(iter(sampler)) == orders[-1]
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(1, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_samples_are_split_by_shares(total, shares):
    if total < len(shares):
        with pytest.raises(ProblemError, match="each needs one or more"):
            split_samples(total, shares)
        return
    counts = split_samples(total, shares)
    assert sum(counts) == total
    assert min(counts) >= 1
    for count, share in zip(counts, shares, strict=True):
        assert count - max(1, total * share / sum(shares)) < 1 + 1e-9


def test_the_gradient_is_that_of_the_global_batch(run_workers):
    """Means over samples and over valid tokens, an uneven last step, accumulation, compressed all-reduces."""
    for outcome in run_workers("shares_worker.py", world_size=3):
        assert outcome.pop("steps") == 3
        outcome.pop("sizes")
        for name, difference in outcome.items():
            assert difference < (0.02 if "BF16" in name and "loss" not in name else 1e-12), name


def test_one_process_needs_no_group():
    loss = torch.tensor(3.0, requires_grad=True)
    qsync_opt.global_mean(loss, 4).backward()
    assert loss.grad == 1.0
    assert qsync_opt.global_mean(torch.tensor(12.0), torch.tensor(4), summed=True) == 3.0
    assert qsync_opt.global_count(7) == 7


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: qsync_opt.ShareSampler(0, [1], rank=0), "samples is 0"),
        (lambda: qsync_opt.ShareSampler(4, [2, 0], rank=0), "batch of rank 1 is 0"),
        (lambda: qsync_opt.ShareSampler(4, [2, 2], rank=2), "rank is 2"),
        (lambda: qsync_opt.ShareSampler(4, [2, 2]), "given for 2 ranks, but there are 1"),
        (lambda: qsync_opt.ShareSampler(4, [2], rank=0).sizes(2), "steps 0 to 1"),
        (lambda: split_samples(4, [1.0, 0.0]), "a number above 0"),
        (lambda: qsync_opt.global_mean(torch.ones(2), 2), "shape"),
        (lambda: qsync_opt.global_mean(torch.ones(()), 0), "count is 0"),
        (lambda: qsync_opt.global_mean(torch.ones(()), 1, total=0), "total is 0"),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(ProblemError, match=text):
        call()
