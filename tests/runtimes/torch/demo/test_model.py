import torch

from qsync_opt.runtimes.torch.demo import Batches, standard_library_text


def test_text_is_the_same_every_time_and_split():
    first, second = standard_library_text(max_bytes=1 << 20), standard_library_text(max_bytes=1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first[0]) > 10 * len(first[1]) / 4
    assert b"import" in bytes(first[1].tolist())


def test_targets_are_the_next_bytes_and_seeds_tell_batches_apart():
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets = Batches(text, batch=3, context=5, seed=1).next()
    assert tokens.shape == targets.shape == (3, 5)
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens, Batches(text, batch=3, context=5, seed=1).next()[0])
    assert not torch.equal(tokens, Batches(text, batch=3, context=5, seed=2).next()[0])
