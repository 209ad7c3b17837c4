import random

import pytest

from qsync_opt.steps.queues import NEVER, NOTHING, Work, compose, launched


def simulate(pieces, host, device):
    """Kernel by kernel: each starts when it may and the one before is done."""
    for host_ns, kernels in pieces:
        for offset, duration in kernels:
            device = max(device, host + offset) + duration
        host += host_ns
    return host, device


def random_pieces(source, count):
    pieces = []
    for _ in range(count):
        host_ns = source.randrange(1, 50)
        offsets = sorted(source.randrange(host_ns) for _ in range(source.randrange(4)))
        pieces.append((host_ns, [(offset, source.randrange(1, 60)) for offset in offsets]))
    return pieces


@pytest.mark.parametrize("seed", range(20))
def test_one_map_is_exact_to_the_kernel(seed):
    source = random.Random(seed)
    pieces = random_pieces(source, source.randrange(1, 30))
    whole = compose(launched(host_ns, kernels) for host_ns, kernels in pieces)
    for host, device in ((0, 0), (0, 500), (300, 10)):
        assert whole.run(host, device) == simulate(pieces, host, device)


def test_composition_is_associative_and_has_a_neutral_piece():
    a, b, c = (launched(*piece) for piece in random_pieces(random.Random(1), 3))
    assert compose([compose([a, b]), c]) == compose([a, compose([b, c])]) == compose([a, b, c])
    assert compose([NOTHING, a]).run(3, 9) == compose([a, NOTHING]).run(3, 9) == a.run(3, 9)


def test_work_without_kernels_does_not_hold_the_device_up():
    assert launched(70, []) == Work(70, 0, NEVER)
    assert launched(70, []).run(1000, 5) == (1070, 5)
