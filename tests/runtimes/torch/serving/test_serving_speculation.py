"""Speculation in the engine: tokens and caches are those of plain decoding whatever is drafted, and faults are said."""

import itertools
import threading
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from qsync_opt.decoding import (  # noqa: E402
    Acceptance,
    AcceptanceCounts,
    Choice,
    ControllerOptions,
    Draft,
    Problem,
    Regime,
    build_problem,
    load_measurements,
    load_speculation,
)
from qsync_opt.errors import ProblemError  # noqa: E402
from qsync_opt.runtimes.torch.decoding import TextIndex  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    PAGE,
    AdaptiveSpeculation,
    Cycle,
    Engine,
    EngineLimits,
    FixedSpeculation,
    LocalWorkers,
    Request,
    StageError,
    StageModel,
    StageOptions,
    StageProcesses,
    answer,
    check_speculation,
    fingerprint,
    first_differences,
    group_names,
    measure_acceptance,
    measure_speculation,
    measure_times,
    metrics_text,
    open_model,
    parse_speculation,
    start_speculation,
    uniform_plan,
)
from qsync_opt.serving import Stage  # noqa: E402

WAIT_S = 120


def stages_of(folder, scheme="W4", cuts=(), **more):
    """The stages of a small model whose weights have 4 bits."""
    config, source = open_model(folder)
    names = group_names(4)
    ends = [0, *cuts, len(names)]
    parts = [Stage(device=f"d{a}", groups=names[a:b]) for a, b in itertools.pairwise(ends)]
    return [StageModel(config, source, part, dict.fromkeys(names, scheme), **more) for part in parts]


WAYS = {"llama": ("W4", None), "qwen2": ("W4H", None), "qwen3": ("W4", 8), "gemma3_text": ("W4H", 8)}


@pytest.fixture(scope="module")
def exact(model_and_folder):
    """Workers of each kind of model, sliding windows too, in FP64; rotated weights and caches of 8 bits among them."""
    model, folder = model_and_folder
    scheme, kv_bits = WAYS[model.config.model_type]
    return LocalWorkers(stages_of(folder, scheme, dtype=torch.float64, kv_bits=kv_bits))


@pytest.fixture(scope="module")
def packed(llama):
    return LocalWorkers(stages_of(llama[1]))


def prompts_of(seed, count):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(0, 9, (size,), generator=generator).tolist() for size in sizes]


class Capped(FixedSpeculation):
    """Drafts that change in length from cycle to cycle."""

    def choose(self, microbatch, batch, context):
        cycle = super().choose(microbatch, batch, context)
        return cycle._replace(length=1 + context % cycle.length)

    def observe(self, microbatch, accepted):
        pass


@settings(max_examples=3, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 14),
    st.sampled_from(["A8", "F8", "A8K4", "lookup"]),
    st.booleans(), st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_tokens_are_those_of_plain_decoding(exact, seed, count, length, new_tokens, draft, capped, temperature):
    prompts = prompts_of(seed, count)
    speculation = (Capped if capped else FixedSpeculation)(draft, length)
    more = {"running": 1 + seed % count, "temperature": temperature}
    plain, _ = answer(exact, prompts, new_tokens, **more)
    assert answer(exact, prompts, new_tokens, speculation=speculation, **more)[0] == plain
    assert [len(tokens) for tokens in plain] == [new_tokens] * count


class Watched(LocalWorkers):
    """Shows the cache of every sequence after every pass, up to what is known to be right."""

    def __init__(self, stages, seen):
        super().__init__(stages)
        self.seen, self.texts = seen, {}

    def submit(self, step):
        super().submit(step)
        result = self._results[-1]
        drafted, tokens = iter(result.drafted), iter(result.tokens)
        lengths = step.draft.lengths if step.draft is not None else [len(t) - 1 for t in step.tokens]
        for row, pages in enumerate(step.pages):
            if step.starts[row] == 0:
                self.texts[pages], drafts = tuple(step.tokens[row]), []
                new = [next(tokens)]
            else:
                drafts = [next(drafted) for _ in range(lengths[row])] if step.draft else list(step.tokens[row][1:])
                new = [next(tokens) for _ in range(lengths[row] + 1)]
            right = 0
            while right < len(drafts) and drafts[right] == new[right]:
                right += 1
            known = step.starts[row] + right + (len(step.tokens[row]) if step.starts[row] == 0 else 1)
            slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(known)])
            caches = [group.cache for group in self._stages[0].groups if hasattr(group, "cache")]
            kept = [pool[:, :, slots].clone() for c in caches for pool in (c.codes, c.scales) if pool is not None]
            self.seen(self.texts[pages], kept)


@pytest.mark.parametrize(
    ("kv_bits", "dtype", "draft"),
    [(None, torch.float32, "A8"), (8, torch.float32, "A8K4"), (None, torch.float64, "lookup")],
)
def test_caches_are_bit_for_bit_those_of_plain_decoding_after_every_cycle(model_and_folder, kv_bits, dtype, draft):
    stages = stages_of(model_and_folder[1], reproducible=True, kv_bits=kv_bits, dtype=dtype)
    prompts, plain, cycles = [*prompts_of(1, 3), [5, 9, 33] * 4], {}, []

    def keep(text, kept):
        plain[text] = kept

    def compare(text, kept):
        cycles.append(kept[0].shape[2])
        for mine, theirs in zip(kept, plain[text], strict=True):
            assert torch.equal(mine, theirs[:, :, : mine.shape[2]])

    expected, _ = answer(Watched(stages, keep), prompts, 8, running=1)
    tokens, _ = answer(Watched(stages, compare), prompts, 8, speculation=FixedSpeculation(draft, 3), running=3)
    assert tokens == expected
    assert len(cycles) > len(prompts)


def test_reproducible_scores_are_those_of_plain_schemes_too(llama):
    stages = stages_of(llama[1], "W32", reproducible=True)
    prompts = prompts_of(2, 4)
    alone = [answer(LocalWorkers(stages), [prompt], 8)[0][0] for prompt in prompts]
    assert answer(LocalWorkers(stages), prompts, 8, speculation=FixedSpeculation("A8", 2))[0] == alone


def test_drafts_need_no_memory(llama):
    (stage,) = stages_of(llama[1])
    workers, before = LocalWorkers([stage]), stage.bytes
    answer(workers, [[1, 2, 3]], 20)
    cached = stage.cache_bytes
    answer(workers, [[1, 2, 3]], 20, speculation=FixedSpeculation("A8", 4))
    assert (stage.bytes, stage.cache_bytes) == (before, cached)


@pytest.mark.parametrize(("right", "each"), [(True, 5), (False, 1)])
def test_drafts_that_are_always_or_never_accepted(llama, monkeypatch, right, each):
    (stage,) = stages_of(llama[1])
    workers, prompt = LocalWorkers([stage]), [4, 5, 6]
    (plain,), _ = answer(workers, [prompt], 21)

    def oracle(step):
        done = step.starts[0] + 1 - len(prompt)
        drafts = [token if right else (token + 1) % 97 for token in plain[done : done + step.draft.lengths[0]]]
        return type(step)(
            number=step.number, tokens=((*step.tokens[0], *drafts),), starts=step.starts, pages=step.pages,
            choices=step.choices, every=True,
        )  # fmt: skip

    monkeypatch.setattr(stage, "draft", oracle)
    speculation = FixedSpeculation("A8", 4)
    with Engine(workers, EngineLimits(context=64, cached=64), speculation=speculation) as engine:
        heard = Heard(prompt, 21)
        engine.submit(heard.request)
        heard.wait()
        assert heard.tokens == plain
        assert engine.counts.decode_passes == (20 // each if right else 20)
        assert sum(engine.counts.accepted) == (16 if right else 0)
    assert speculation.acceptance.interval(4).mid == float(right)


class Heard:
    """A request with what it heard."""

    def __init__(self, prompt, new_tokens, **more):
        self.tokens, self.ended, self.last, self.first = [], threading.Event(), None, threading.Event()
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


def test_stop_tokens_inside_drafts_end_a_request(packed):
    prompts = prompts_of(3, 5)
    free, _ = answer(packed, prompts, 20)
    ends = {tokens[6] for tokens in free}
    plain, _ = answer(packed, prompts, 20, ends=tuple(ends))
    assert min(map(len, plain)) <= 6
    for draft in ("A8", "lookup"):
        assert answer(packed, prompts, 20, ends=tuple(ends), speculation=FixedSpeculation(draft, 5))[0] == plain


class Bounded(LocalWorkers):
    """Workers that check that every position of a pass has a page of its sequence."""

    def submit(self, step):
        lengths = step.draft.lengths if step.draft is not None else [0] * len(step.tokens)
        for tokens, start, pages, length in zip(step.tokens, step.starts, step.pages, lengths, strict=True):
            assert (start + len(tokens) + length - 1) // PAGE < len(pages)
        assert len({page for pages in step.pages for page in pages}) == sum(map(len, step.pages))
        super().submit(step)


def test_drafts_never_go_beyond_their_pages(llama):
    workers = Bounded(stages_of(llama[1]))
    prompts = [[1] * size for size in (1, 15, 16, 17)]
    for draft in ("A8", "lookup"):
        with Engine(workers, EngineLimits(context=33, cached=144), speculation=FixedSpeculation(draft, 16)) as engine:
            heard = [Heard(prompt, 16) for prompt in prompts]
            for one in heard:
                engine.submit(one.request)
            assert [one.wait().finish for one in heard] == ["length"] * 4
            assert engine.pages_used == 0


def test_a_request_has_a_limit_of_its_own(packed):
    with Engine(packed, EngineLimits(context=64, cached=256), speculation=FixedSpeculation("A8", 4)) as engine:
        for limit, drafted in ((0, [0] * 5), (2, [1, 1, 0, 0, 0])):
            heard = Heard([3, 1, 4], 12, drafts=limit)
            engine.submit(heard.request)
            heard.wait()
            assert [bool(count) for count in engine.counts.drafted[:5]] == [bool(one) for one in drafted]


def test_a_request_whose_scores_hold_nan_fails_alone_and_spoils_no_page(llama):
    (stage,) = stages_of(llama[1])
    workers, prompts = LocalWorkers([stage]), [[1, 2, 3] * 6, [4, 5] * 8]
    plain = [answer(workers, [prompt], 14)[0][0] for prompt in prompts]
    bad = next(token for token in range(97) if all(token not in [*p, *t] for p, t in zip(prompts, plain, strict=True)))
    stage._embedding.weight[bad] = torch.nan
    with Engine(workers, EngineLimits(context=32, cached=64), speculation=FixedSpeculation("A8", 3)) as engine:
        beside = Heard(prompts[0], 14)
        spoiled = Heard([bad] * 18, 14)
        for one in (beside, spoiled):
            engine.submit(one.request)
        assert "NaN" in spoiled.wait().error
        assert beside.wait().finish == "length"
        after = Heard(prompts[1], 14)  # gets the pages of the one that failed
        engine.submit(after.request)
        assert after.wait().finish == "length"
        assert [beside.tokens, after.tokens] == plain
        assert (engine.counts.finished["failed"], engine.failure, engine.pages_used) == (1, None, 0)


def test_a_request_that_is_cancelled_while_it_is_drafted_for(llama, held):
    workers = held(stages_of(llama[1]))
    with Engine(workers, EngineLimits(context=64, cached=64), speculation=FixedSpeculation("A8", 3)) as engine:
        gone, stays = Heard([1, 2], 30), Heard([3], 9)
        for one in (gone, stays):
            engine.submit(one.request)
        workers.permits.release(1)
        assert gone.first.wait(WAIT_S)
        engine.cancel(gone.request)
        workers.let_go()
        assert gone.wait().finish == "cancelled"
        assert stays.wait().finish == "length"
        assert engine.pages_used == 0


@pytest.mark.parametrize("draft", ["lookup", "A8"])
def test_pipelines_speculate(llama, draft):
    workers = LocalWorkers(stages_of(llama[1], cuts=(3,), dtype=torch.float64))
    prompts = [*prompts_of(4, 3), [5, 9, 33] * 4]
    plain, _ = answer(workers, prompts, 14)
    speculation = FixedSpeculation(draft, 3)
    assert answer(workers, prompts, 14, speculation=speculation, running=3)[0] == plain
    assert sum(speculation.acceptance.accepted) > 0


def test_processes_of_a_pipeline_speculate(llama):
    plan = uniform_plan(open_model(llama[1])[0], "W4")
    names = plan.stages[0].groups
    parts = tuple(Stage(device=f"d{k}", groups=part) for k, part in enumerate((names[:3], names[3:])))
    prompts = [*prompts_of(4, 2), [5, 9, 33] * 4]
    options = StageOptions(dtype=torch.float64, kv_bits=8)
    expected = LocalWorkers(stages_of(llama[1], dtype=torch.float64, kv_bits=8))
    plain, _ = answer(expected, prompts, 12)
    with StageProcesses(str(llama[1]), replace(plan, stages=parts), options) as stages:
        assert set(stages.draft_refusals) <= {"A8", "F8", "A8K4"}  # those that need a compiler
        for draft in ("lookup", "A8K4"):
            assert answer(stages, prompts, 12, speculation=FixedSpeculation(draft, 3))[0] == plain
        times = measure_times(stages, ["lookup", "K4"], [2], 1, 20, rounds=1)
        assert set(times[0]) == {1, 3} and set(times[1]) == {"lookup", "K4"}


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_an_index_finds_what_a_scan_finds(text, length):
    def scan():
        for size in range(3, 0, -1):
            for begin in range(len(text) - size - 1, -1, -1):
                if text[begin : begin + size] == text[len(text) - size :]:
                    return text[begin + size : begin + size + length]
        return []

    index = TextIndex()
    for token in text:
        index.extend([token])
    assert index.following(length) == scan()
    assert len(index) == len(text)


def problem_of(draft="A8", draft_ns=10, verify_ns=105, low=0.9, more=None):
    choices = tuple(
        Choice(draft=draft, length=n, draft_ns=draft_ns, verify_ns=verify_ns, acceptance=Acceptance(low=low))
        for n in (1, 3)
    )
    sizes = {"small": (1, 128), "large": (8, 128), "long": (8, 1024)}
    extras = {("regimes", name, key): value for name, pair in sizes.items()
              for key, value in zip(("x-batch", "x-context"), pair, strict=True)}  # fmt: skip
    regimes = tuple(Regime(name=name, weight=1.0, plain_ns=100, choices=choices) for name in sizes)
    return Problem(
        name="p", memory_kib=0, confidence="low", drafts={draft: Draft(memory_kib=0)}, regimes=regimes,
        extras={**extras, **(more or {})},
    )  # fmt: skip


def test_the_regime_is_the_smallest_measured_one_that_holds_a_pass():
    speculation = AdaptiveSpeculation(problem_of())
    for batch, context, regime in ((1, 5, "small"), (2, 128, "large"), (8, 129, "long"), (50, 9999, "long"),
                                   (1, 4000, "small")):  # fmt: skip
        assert speculation.regime(batch, context) == regime


@pytest.mark.parametrize(("verify_ns", "drafts"), [(105, True), (900, False)])
def test_a_server_speculates_where_it_pays(packed, verify_ns, drafts):
    speculation = AdaptiveSpeculation(problem_of(verify_ns=verify_ns), options=ControllerOptions(trial_share=0.0))
    prompts = prompts_of(5, 4)
    plain, _ = answer(packed, prompts, 20)
    with Engine(packed, EngineLimits(context=64, cached=256), speculation=speculation) as engine:
        heard = [Heard(prompt, 20) for prompt in prompts]
        for one in heard:
            engine.submit(one.request)
        for one in heard:
            one.wait()
        assert [one.tokens for one in heard] == plain
        assert (engine.counts.drafts > 0) == drafts


def test_a_draft_that_is_never_accepted_is_given_up(packed, monkeypatch):
    prompt = [4, 5, 6]
    (plain,), _ = answer(packed, [prompt], 90)

    def wrong(step):
        done = step.starts[0] + 1 - len(prompt)
        drafts = [(token + 1) % 97 for token in plain[done : done + step.draft.lengths[0]]]
        return type(step)(
            number=step.number, tokens=((*step.tokens[0], *drafts),), starts=step.starts, pages=step.pages,
            choices=step.choices, every=True,
        )  # fmt: skip

    monkeypatch.setattr(packed._stages[0], "draft", wrong)
    speculation = AdaptiveSpeculation(problem_of(), options=ControllerOptions(trial_share=0.0))
    with Engine(packed, EngineLimits(context=256, cached=256), speculation=speculation) as engine:
        heard = Heard(prompt, 90)
        engine.submit(heard.request)
        heard.wait()
        assert heard.tokens == plain
        assert 0 < engine.counts.drafts <= 64


def lookup_judged(prompt, new, longest, alone):
    """Positions of drafts that follow each other, and whether each is right, from the second new token on."""
    found, done = [], 1
    while done < len(new):
        index = TextIndex()
        index.extend([*prompt, *new[:done]])
        draft, agreed = index.following(longest), 0
        while agreed < longest and done < len(new):
            right = draft[agreed : agreed + 1] == [new[done]]
            if draft or not alone:
                found.append((agreed, right))
            done += 1
            if not right:
                break
            agreed += 1
        else:
            done += 1
    return Counter(found)


@pytest.fixture
def watched(monkeypatch):
    """How often each position of a watched draft was right and wrong."""
    seen = Counter()

    def watch(self, microbatch, judged, seconds):
        for verdict in judged:
            seen[verdict.position, True] += verdict.accepted
            seen[verdict.position, False] += verdict.rejected

    monkeypatch.setattr(AdaptiveSpeculation, "watch", watch)
    return seen


@pytest.mark.parametrize("prompts", [[[4, 5, 6]], [[4, 5, 6], [7, 7, 7], [1, 2, 3]]])
def test_lookup_is_watched_while_decoding_is_plain(packed, prompts, watched):
    speculation = AdaptiveSpeculation(problem_of(draft="lookup", verify_ns=900, low=0.1))
    assert speculation.watched == 3
    plain, _ = answer(packed, prompts, 60)
    tokens, _ = answer(packed, prompts, 60, speculation=speculation)
    assert tokens == plain
    expected = Counter()
    for prompt, new in zip(prompts, plain, strict=True):
        expected += lookup_judged(prompt, new, 3, alone=len(prompts) == 1)
    assert expected.total() > 20
    assert +watched == expected
    assert AdaptiveSpeculation(problem_of()).watched == 0
    assert AdaptiveSpeculation(problem_of(draft="lookup"), refused={"lookup": "none"}).watched == 0


def test_lookup_is_watched_behind_the_tokens_that_it_drafts(packed, watched, monkeypatch):
    speculation = AdaptiveSpeculation(problem_of(draft="lookup", low=0.1))
    monkeypatch.setattr(AdaptiveSpeculation, "choose", lambda *_: Cycle("lookup", 1))
    monkeypatch.setattr(AdaptiveSpeculation, "observe", lambda *_: None)
    prompts = [[4, 5, 6], [7, 7, 7], [1, 2, 3], [9, 8, 7]]
    plain, _ = answer(packed, prompts, 120)
    tokens, _ = answer(packed, prompts, 120, speculation=speculation)
    assert tokens == plain
    expected = Counter()
    for prompt, new in zip(prompts, plain, strict=True):
        expected += lookup_judged(prompt, new, 3, alone=False)
    behind = Counter({key: count for key, count in expected.items() if key[0] >= 1})
    assert behind.total() > 2
    assert +watched == behind


def test_watching_pauses_until_it_has_taken_no_more_than_its_share():
    problem = problem_of(draft="lookup", verify_ns=900, low=0.1)
    speculation = AdaptiveSpeculation(problem)
    plain_s = problem.regimes[0].plain_ns / 1e9
    assert speculation.choose(0, 1, 1).draft is None
    speculation.watch(0, [], 50 * plain_s)
    passes = 0
    while not speculation.watched:
        speculation.choose(0, 1, 1)
        speculation.observe(0, [0])
        passes += 1
    assert passes >= 50 / 0.001


def test_after_a_pause_watching_begins_with_a_new_draft():
    request = Heard([1, 2, 3, 4, 5, 6], 10).request
    request.tokens = [1, 2, 3]
    assert list(request.judge_lookup(1, 4, alone=True)) == [(0, True)]
    request.tokens += [4]
    assert list(request.judge_lookup(1, 4, alone=True)) == [(1, True)]
    request.tokens += [7, 1, 2, 3]
    assert list(request.judge_lookup(1, 4, alone=True)) == [(0, True)]


def test_beliefs_cross_regimes():
    speculation = AdaptiveSpeculation(problem_of(), options=ControllerOptions(trial_share=0.0))
    for _ in range(64):
        cycle = speculation.choose(0, 1, 5)
        speculation.observe(0, [0])
    assert cycle.length == 0
    assert speculation.choose(0, 8, 5).length == 0
    assert AdaptiveSpeculation(problem_of()).choose(0, 8, 5).length > 0
    assert AdaptiveSpeculation(problem_of(), refused={"A8": "no kernel"}).choose(0, 8, 5).length == 0


def test_metrics_count_by_position(packed):
    with Engine(packed, EngineLimits(context=64, cached=64), speculation=FixedSpeculation("A8", 3)) as engine:
        heard = Heard([3, 1, 4], 30)
        engine.submit(heard.request)
        heard.wait()
        text, counts = metrics_text(engine), engine.counts
    assert f"qsync_serving_spec_decode_num_drafts_total {counts.drafts}\n" in text
    assert f"qsync_serving_spec_decode_num_draft_tokens_total {sum(counts.drafted)}\n" in text
    assert f"qsync_serving_spec_decode_num_accepted_tokens_total {sum(counts.accepted)}\n" in text
    for position in range(3):
        value = counts.accepted[position]
        assert f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {value}\n' in text
    assert 'position="3"' not in text
    assert counts.drafts >= counts.drafted[1] >= counts.drafted[2] > 0


def test_measurements_become_a_problem_that_a_server_takes(packed, tmp_path):
    said = []
    measured = measure_speculation(
        packed, prompts_of(6, 3), batches=(1, 2), contexts=(20,), lengths=(1, 2), new_tokens=10, rounds=1,
        served="sha256:x", say=said.append,
    )  # fmt: skip
    assert {regime.name for regime in measured.regimes} == {"batch 1, context 20", "batch 2, context 20"}
    assert set(measured.regimes[0].verify_ns) == {1, 2, 3}
    assert min(measured.regimes[0].verify_ns.values()) > 0
    assert set(measured.drafts) >= {"lookup"}
    measured.save(tmp_path / "measured.json")
    assert load_measurements(tmp_path / "measured.json") == measured
    problem = load_speculation(tmp_path / "measured.json")
    assert problem == build_problem(measured)
    problem.save(tmp_path / "problem.json")
    assert load_speculation(tmp_path / "problem.json").extras == problem.extras
    speculation = AdaptiveSpeculation(problem)
    assert speculation.regime(2, 10) == "batch 2, context 20"
    for draft, found in measured.drafts.items():  # what cannot gain is not tried, what is tried is judged
        tried = f"counting what is accepted of {draft}" in said
        assert tried == (found.judged[0] > 0)
        assert tried != any(line.startswith(f"{draft} would lose") for line in said)
    for wrong in ({"lengths": (17,)}, {"batches": ()}, {"contexts": (0,)}):
        with pytest.raises(ProblemError):
            measure_speculation(packed, [[1]], **wrong)


@pytest.fixture
def served(llama):
    """Workers that know how they are served, as processes do."""
    workers = LocalWorkers(stages_of(llama[1]))
    workers.plan, workers.options = uniform_plan(workers.config, "W4"), StageOptions()
    return workers, str(llama[1])


def test_specifications_start_what_they_say(served, tmp_path):
    workers, folder = served
    limits = EngineLimits(context=64, cached=64, running=2)

    def start(text):
        return start_speculation(text, folder, workers, limits)

    assert start("off") == (None, ())
    assert start("lookup:3").speculation.cycle == ("lookup", 3)
    workers.draft_refusals = {}
    assert start("A8:2").speculation.cycle == ("A8", 2)
    assert set(LocalWorkers(stages_of(folder)).draft_refusals) >= {"K4", "A8K4"}
    workers.draft_refusals = {"A8": "there is no kernel for it"}
    assert start("A8:2") == (None, ("plain decoding: A8:2 cannot gain, because there is no kernel for it",))
    path, model = tmp_path / "p.json", fingerprint(folder, workers.plan, workers.options)
    problem_of().save(path)
    assert "was measured of an unknown model" in start(str(path)).lines[0]
    problem_of(more={("x-model",): model}).save(path)
    started = start(str(path))
    assert started.speculation.drafts == frozenset()
    assert started.lines[0] == "A8 is left out: there is no kernel for it"
    assert "small: at first speculates with 3 tokens of A8" in started.lines[1]


def test_other_weights_or_another_way_to_serve_are_noticed(served, tmp_path):
    workers, folder = served
    first = fingerprint(folder, workers.plan, workers.options)
    assert first == fingerprint(folder, workers.plan, workers.options)
    assert first != fingerprint(folder, uniform_plan(workers.config, "W8"), workers.options)
    assert first != fingerprint(folder, workers.plan, StageOptions(kv_bits=8))
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(10_000))
    before = fingerprint(file, workers.plan, workers.options)
    file.write_bytes(bytes(5_000) + b"\1" + bytes(4_999))
    assert before != fingerprint(file, workers.plan, workers.options)


def test_auto_measures_first(served):
    workers, folder = served
    said = []
    limits = EngineLimits(context=64, cached=256, running=4)
    started = start_speculation("auto", folder, workers, limits, say=said.append)
    assert any("timing batch 4" in line for line in said)
    prompts = [*prompts_of(7, 3), [5, 9, 33] * 4]
    plain, _ = answer(workers, prompts, 20)
    assert answer(workers, prompts, 20, speculation=started.speculation)[0] == plain
    assert {line.partition(":")[0] for line in started.lines} == {"batch 1, context 32", "batch 4, context 32"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lookup", r"speculation is 'lookup', but allowed are off, auto, lookup:N, A8:N, F8:N, K4:N, A8K4:N,"),
        ("lookup:x", "speculation is 'lookup:x'"),
        ("A4:2", "draft is 'A4', but allowed are lookup, A8, F8, K4, A8K4"),
        ("A8:0", "a draft has 0 tokens, but allowed are 1 to 16"),
        ("A8:17", "a draft has 17 tokens"),
        ("no/such.json", "no/such.json"),
    ],
)
def test_unusable_specifications_are_refused(text, message):
    with pytest.raises(ProblemError, match=message):
        check_speculation(text)
    assert parse_speculation("off") is None


def test_problems_of_other_machines_are_refused():
    with pytest.raises(ProblemError, match="has the draft 'A4', but this server has lookup, A8, F8, K4, A8K4"):
        AdaptiveSpeculation(problem_of("A4"))
    with pytest.raises(ProblemError, match=r"regime 'small' .* has x-batch 0"):
        AdaptiveSpeculation(problem_of(more={("regimes", "small", "x-batch"): 0}))


def test_an_answer_that_fails_is_an_error(llama):
    (stage,) = stages_of(llama[1])
    stage._embedding.weight[7] = torch.nan
    with pytest.raises(StageError, match="NaN"):
        answer(LocalWorkers([stage]), [[7]], 3)


def test_acceptance_is_counted_over_answers(packed):
    texts = measure_acceptance(packed, "A8", 3, prompts_of(8, 3), 25)
    assert len(texts) == 3
    assert all(text.judged[0] > 0 for text in texts)
    counts = AcceptanceCounts.summed(texts)
    assert counts.judged[0] >= counts.judged[1] >= counts.judged[2] > 0
    assert counts.judged[1:] == counts.accepted[:2]
    assert counts.interval(3).mid > 0.5


@pytest.mark.parametrize("cuts", [(), (3,)])
def test_differences_are_found_with_the_scores_between_them(llama, cuts):
    stages, prompts = stages_of(llama[1], cuts=cuts, dtype=torch.float64), prompts_of(9, 3)
    plain, _ = answer(LocalWorkers(stages), prompts, 8)
    assert first_differences(stages, prompts, plain, plain) == ()
    other = [list(tokens) for tokens in plain]
    other[1][5] = (other[1][5] + 1) % 97
    del other[2][4:]
    (found,) = first_differences(stages, prompts, plain, other)
    assert (found.prompt, found.position, found.token, found.other) == (1, 5, plain[1][5], other[1][5])
    assert found.margin > 0  # what plain decoding takes has the highest score
    (turned,) = first_differences(stages, prompts, other, plain)
    assert turned.margin == pytest.approx(-found.margin)
    assert found.spread > 0
    with pytest.raises(ProblemError, match="3 prompts, 2 answers and 3 others"):
        first_differences(stages, prompts, plain[:2], plain)
