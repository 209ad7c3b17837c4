"""Replayed drafts are those that a server would have drafted and accepted."""

import sys
from pathlib import Path

import pytest
import torch

from qsync_opt.decoding import AcceptanceCounts
from qsync_opt.runtimes.torch.serving import (
    SELF_DRAFTS,
    FixedSpeculation,
    LocalWorkers,
    StageModel,
    StateSource,
    answer,
    config_from_json,
    random_state,
    sample_config,
    uniform_plan,
)

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
PROMPTS, NEW = [[1, 2, 3], [4] * 15, [5, 9, 33] * 4], 40


@pytest.fixture(scope="module")
def replay():
    sys.path.insert(0, BENCHMARKS)
    import decoding_replay

    yield decoding_replay
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def stage():
    sizes = {"layers": 2, "hidden": 32, "inner": 64, "heads": 4, "kv_heads": 2, "vocabulary": 211}
    config = config_from_json(sample_config(**sizes))
    plan = uniform_plan(config, "W4H")
    source = StateSource(random_state(config, scale=0.3))
    return StageModel(config, source, plan.stages[0], plan.schemes, dtype=torch.float64, kv_bits=8)


def whole_cycles(speculation):
    """The counts of a server's cycles."""

    class Kept(FixedSpeculation):
        def __init__(self):
            super().__init__(*speculation)
            self.cycles = []

        def observe(self, microbatch, accepted):
            self.cycles += accepted

    return Kept()


@pytest.mark.parametrize("draft", ["F8", "A8K4"])
def test_own_drafts(replay, stage, draft):
    answers, _ = answer(LocalWorkers([stage]), PROMPTS, NEW)
    server = whole_cycles((draft, 3))
    assert answer(LocalWorkers([stage]), PROMPTS, NEW, speculation=server)[0] == answers
    texts = replay.fill(stage, PROMPTS, answers)
    before = [pool.clone() for pool in replay._caches(stage)]
    counts = replay.replay_self(stage, texts, PROMPTS, SELF_DRAFTS[draft], 3, 10**6)
    for pool, kept in zip(replay._caches(stage), before, strict=True):
        assert torch.equal(pool, kept)
    found = AcceptanceCounts.of_cycles(server.cycles, 3)
    assert tuple(map(sum, zip(*(c.judged for c in counts), strict=True))) == found.judged
    assert tuple(map(sum, zip(*(c.accepted for c in counts), strict=True))) == found.accepted
    assert 0 < sum(found.accepted) < 3 * found.judged[0]


def test_look_up(replay, stage):
    answers, _ = answer(LocalWorkers([stage]), PROMPTS[2:], NEW)
    server = whole_cycles(("lookup", 3))
    answer(LocalWorkers([stage]), PROMPTS[2:], NEW, speculation=server)
    cycles = replay.replay_lookup(PROMPTS[2], answers[0], 3)
    assert [agreed for _, agreed in cycles] == server.cycles
