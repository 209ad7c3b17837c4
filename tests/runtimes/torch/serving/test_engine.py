"""Continuous batching: tokens do not depend on who runs beside, pages come back, failures reach everybody."""

import os
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

from qsync_opt.errors import ProblemError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    Engine,
    EngineLimits,
    FullError,
    LocalWorkers,
    Request,
    StageError,
    StageProcesses,
    generate_here,
)

WAIT_S = 120


class Heard:
    """A request with what it heard."""

    def __init__(self, prompt, new_tokens, **more):
        self.tokens, self.ended, self.last = [], threading.Event(), None
        self.first = threading.Event()
        self.request = Request(prompt=prompt, new_tokens=new_tokens, listener=self.hear, **more)

    def hear(self, update):
        if update.token is not None:
            self.tokens.append(update.token)
            self.first.set()
        else:
            self.last = update
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S)
        return self.last


def prompts_of(count):
    return [[(7 * k + 11 * j + 1) % 97 for j in range(1 + (5 * k) % 23)] for k in range(count)]


def check_all(workers, expected, prompts, **limits):
    with Engine(workers, EngineLimits(context=64, cached=256, **limits)) as engine:
        heard = [Heard(prompt, len(tokens)) for prompt, tokens in zip(prompts, expected, strict=True)]
        for one in heard:
            engine.submit(one.request)
        assert [one.wait().finish for one in heard] == ["length"] * len(heard)
        assert [one.tokens for one in heard] == expected
        assert engine.pages_used == engine.running == engine.waiting == 0
        assert engine.counts.finished["length"] == len(heard)
        assert engine.counts.new_tokens == sum(map(len, expected))
        assert engine.counts.prompt_tokens == sum(map(len, prompts))


def test_tokens_do_not_depend_on_batches_or_stages(llama, load):
    _, folder = llama
    prompts = prompts_of(12)
    one = load(folder)
    expected = [generate_here(one, [prompt], 1 + k % 9)[0] for k, prompt in enumerate(prompts)]
    for running, batches, prefill in ((1, 1, 8), (4, 1, 1), (5, 2, 40), (12, 3, 1000)):
        check_all(LocalWorkers(one), expected, prompts, running=running, microbatches=batches, prefill=prefill)
    check_all(LocalWorkers(load(folder, 3)), expected, prompts, running=4, microbatches=2)
    check_all(LocalWorkers(load(folder, 2, 5)), expected, prompts, running=6, microbatches=3)


def test_stages_as_processes(llama, load, plan_of):
    _, folder = llama
    prompts = prompts_of(6)
    expected = [generate_here(load(folder), [prompt], 5)[0] for prompt in prompts]
    seen = []
    workers = StageProcesses(str(folder), plan_of(3), progress=lambda *state: seen.append(state))
    assert seen[-1][:2] == (8, 8)
    check_all(workers, expected, prompts, running=4, microbatches=2)


def test_an_end_token_ends_a_request_and_is_not_passed_on(llama, load):
    _, folder = llama
    stages = load(folder)
    (tokens,) = generate_here(stages, [[5, 9]], 20)
    end = tokens[7]
    with Engine(LocalWorkers(stages), EngineLimits(context=64, cached=64)) as engine:
        heard = Heard([5, 9], 20, ends=(end,))
        engine.submit(heard.request)
        assert heard.wait().finish == "stop"
        assert heard.tokens == tokens[: tokens.index(end)]


def test_drawn_tokens_follow_the_seed_alone(llama, load):
    _, folder = llama
    stages = load(folder)
    with Engine(LocalWorkers(stages), EngineLimits(context=64, cached=1024)) as engine:
        heard = [Heard([5, 9], 12, temperature=1.5, seed=seed) for seed in (1, 2, 1)]
        heard.insert(0, Heard([1, 2, 3], 30))
        for one in heard:
            engine.submit(one.request)
            one.first.wait(WAIT_S)  # each joins at another time
        for one in heard:
            one.wait()
    assert heard[1].tokens == heard[3].tokens != heard[2].tokens


def test_requests_wait_for_memory_and_are_refused_beyond_the_queue(llama, load, held):
    _, folder = llama
    workers = held(load(folder))
    with Engine(workers, EngineLimits(context=64, cached=128, running=8, waiting=2)) as engine:
        running = [Heard([1] * 30, 34) for _ in range(2)]  # 4 of 8 pages each
        waiting = [Heard([2], 3) for _ in range(2)]
        for one in running:
            engine.submit(one.request)
        for _ in range(2):
            workers.permits.release()
        for one in running:
            assert one.first.wait(WAIT_S)
        for one in waiting:
            engine.submit(one.request)
        with pytest.raises(FullError, match="2 requests run and 2 wait"):
            engine.submit(Heard([3], 1).request)
        assert engine.pages_used == engine.pages == 8
        assert engine.counts.refused == 1
        engine.cancel(running[0].request)
        workers.let_go()
        assert running[0].wait().finish == "cancelled"
        assert [one.wait().finish for one in (running[1], *waiting)] == ["length"] * 3
        assert engine.pages_used == 0


def test_what_can_never_be_served_is_refused(llama, load):
    _, folder = llama
    with Engine(LocalWorkers(load(folder)), EngineLimits(context=32, cached=64)) as engine:
        with pytest.raises(ProblemError, match=r"30 tokens and 3 new ones .* planned for 32"):
            engine.submit(Heard([1] * 30, 3).request)
        with pytest.raises(ProblemError, match="token 97"):
            engine.submit(Heard([97], 3).request)
        with pytest.raises(ProblemError, match="at least 1"):
            engine.submit(Heard([9], 0).request)
    with pytest.raises(ProblemError, match="caches hold 64"):
        EngineLimits(context=65, cached=64)


def test_a_killed_stage_fails_all_requests_and_the_engine(llama, plan_of):
    _, folder = llama
    workers = StageProcesses(str(folder), plan_of(3))
    failures = []
    with Engine(workers, EngineLimits(context=2000, cached=4000, running=1), on_failure=failures.append) as engine:
        running, waiting = Heard([1, 2], 1900), Heard([3], 5)
        engine.submit(running.request)
        engine.submit(waiting.request)
        assert running.first.wait(WAIT_S)
        os.kill(workers.pids[0], signal.SIGKILL)
        assert "stage" in running.wait().error
        assert "stage" in waiting.wait().error
        with pytest.raises(StageError, match="stage"):
            engine.submit(Heard([3], 5).request)
    assert len(failures) == 1
    assert engine.pages_used == 0


def test_closing_ends_what_runs(llama, load, held):
    _, folder = llama
    workers = held(load(folder))
    engine = Engine(workers, EngineLimits(context=64, cached=64))
    heard = Heard([1], 60)
    engine.submit(heard.request)
    workers.permits.release(3)
    assert heard.first.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    workers.let_go()
    closing.join(WAIT_S)
    assert heard.wait() is not None
    with pytest.raises(StageError):
        engine.submit(Heard([3], 5).request)
