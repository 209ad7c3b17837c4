"""The position in the data: kept by checkpoints, for any number of ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.checkpoints import Checkpoints, ResumableLoader, loader
from qsync_opt.runtimes.torch.checkpoints import checkpoints as saving

DATA = TensorDataset(torch.arange(26))


def _values(batches):
    return [batch[0].tolist() for batch in batches]


def _on(monkeypatch, rank, size):
    monkeypatch.setattr(loader, "world", lambda: (rank, size))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_behind_the_last_batch(tmp_path, workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    model, batches = nn.Linear(1, 1), ResumableLoader(DATA, 4, seed=3, **options)
    whole = [_values(batches) for _ in range(3)]
    assert len({tuple(map(tuple, epoch)) for epoch in whole}) == 3  # each in another order
    assert all(len(epoch) == 6 and len({v for batch in epoch for v in batch}) == 24 for epoch in whole)
    again = ResumableLoader(DATA, 4, seed=3, **options)
    saved = Checkpoints(tmp_path, model, batches=again)
    got = _values(again)
    for number, batch in enumerate(again):
        got.append(batch[0].tolist())
        if number == 2:
            saved.save(9)
            break
    last = ResumableLoader(DATA, 4, seed=3)
    Checkpoints(tmp_path, model, batches=last).load()
    assert (last.epoch, len(last)) == (1, 3)
    assert got + _values(last) == whole[0] + whole[1]
    assert _values(last) == whole[2]


def test_other_numbers_of_ranks_use_each_sample_once(monkeypatch):
    used, state = [], ResumableLoader(DATA, 2, seed=1).state_dict()
    for size, steps in ((2, 2), (3, 1), (1, 6)):
        ranks = []
        for rank in range(size):
            _on(monkeypatch, rank, size)
            own = ResumableLoader(DATA, 2, seed=1)
            own.load_state_dict(state)
            for step, batch in enumerate(own, 1):
                used += batch[0].tolist()
                if step == steps:
                    break
            ranks.append(own.state_dict())
        assert all(each == ranks[0] for each in ranks)
        state = ranks[0]
    assert sorted(used) == list(range(26))
    assert state["position"] == 26


def test_states_that_do_not_fit_are_refused():
    own = ResumableLoader(DATA, 2)
    state = own.state_dict()
    with pytest.raises(ModelError, match="seed was 1 and is 0"):
        own.load_state_dict({**state, "seed": 1})
    with pytest.raises(ModelError, match="samples was 9 and is 26"):
        own.load_state_dict({**state, "samples": 9})
    with pytest.raises(ProblemError, match="position is 99"):
        own.load_state_dict({**state, "position": 99})
    with pytest.raises(ProblemError, match="format"):
        own.load_state_dict({**state, "format": "x"})
    with pytest.raises(ModelError, match="has no length"):
        ResumableLoader(iter([]), 2)


class StatefulDataLoader:
    """As that of torchdata, which need not be installed."""

    def __init__(self):
        self.yielded = 0

    def state_dict(self):
        return {"_num_yielded": self.yielded}

    def load_state_dict(self, state):
        self.yielded = state["_num_yielded"]


StatefulDataLoader.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"


def test_a_loader_of_torchdata_goes_on_with_as_many_ranks_only(tmp_path, monkeypatch):
    model, batches = nn.Linear(1, 1), StatefulDataLoader()
    batches.yielded = 7
    Checkpoints(tmp_path, model, batches=batches).save(1)
    again = StatefulDataLoader()
    Checkpoints(tmp_path, model, batches=again).load()
    assert again.yielded == 7
    _on(monkeypatch, 0, 2)
    with pytest.raises(ModelError, match=r"'batches' \(StatefulDataLoader\) is one of 1 ranks, and this job has 2"):
        Checkpoints(tmp_path, model, batches=again).load()


def test_states_that_differ_between_ranks_are_refused_by_name(tmp_path, monkeypatch):
    model, batches = nn.Linear(1, 1), StatefulDataLoader()
    original = saving.gather_together

    def unlike(work, group=None):
        (own,) = original(work, group)
        return [own, {**own, "others": {"batches": "other"}}] if isinstance(own, dict) else [own]

    monkeypatch.setattr(saving, "gather_together", unlike)
    with pytest.raises(ModelError, match="the state of 'batches' is another one on rank 1 than on rank 0"):
        Checkpoints(tmp_path, model, batches=batches).save(1)
