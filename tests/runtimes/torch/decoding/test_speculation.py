"""Speculative decoding equals plain decoding: tokens, caches, distributions, stops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.decoding import Acceptance, Choice, Controller, Draft, Problem, Regime
from qsync_opt.errors import ModelError, NotReadyError, UnsupportedError
from qsync_opt.runtimes.torch.decoding import (
    Drafts,
    FixedPolicy,
    LookupDrafter,
    ModelDrafter,
    Sampling,
    TransformersModel,
    activations,
    generate,
    pack_linears,
    verify_greedily,
    verify_sampled,
)

transformers = pytest.importorskip("transformers")
VOCABULARY = 61


def llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def gemma():
    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return transformers.Gemma3ForCausalLM(config).to(torch.float64).eval()


@pytest.fixture(scope="module", params=[llama, gemma])
def network(request):
    return request.param()


@pytest.fixture(scope="module")
def target():
    return TransformersModel(llama())


@pytest.fixture(scope="module")
def packed():
    """A model with packed weights, and drafts of its own weights at 8-bit activations."""
    module = llama()
    assert pack_linears(module, 4, 64) == 14
    model = TransformersModel(module)
    return model, {"A8": ModelDrafter(model, lambda: activations(module, "A8")), "lookup": LookupDrafter()}


class Oracle:
    """Drafts what plain decoding gives, or a token that it does not give."""

    def __init__(self, answers, right):
        self.answers, self.right = answers, right

    def draft(self, texts, lengths_B, cache, sampling, generator):
        width = int(lengths_B.max())
        rows = []
        for text in texts:
            whole = next(a for a in self.answers if list(a[: len(text)]) == list(text))
            following = (list(whole[len(text) :]) + [0] * width)[:width]
            rows.append(following if self.right else [(token + 1) % VOCABULARY for token in following])
        return Drafts(torch.tensor(rows), lengths_B, None)


def prompts_of(seed, count):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(0, 7, (size,), generator=generator).tolist() for size in sizes]


def test_plain_decoding_is_that_of_transformers(network):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = network.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert list(generate(TransformersModel(network), [prompt], 20).tokens[0]) == expected[0, len(prompt) :].tolist()


def test_batches_are_their_sequences(network):
    model, prompts = TransformersModel(network), prompts_of(0, 5)
    together = generate(model, prompts, 12)
    assert together.tokens == tuple(generate(model, [prompt], 12).tokens[0] for prompt in prompts)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 10),
    st.sampled_from(["A8", "lookup"]),
    st.booleans(),
)
def test_greedy_tokens_are_those_of_plain_decoding(packed, seed, count, length, new_tokens, draft, ragged):
    model, drafters = packed
    prompts = prompts_of(seed, count)
    lengths = [(seed + i) % (length + 1) for i in range(count)] if ragged else None
    plain = generate(model, prompts, new_tokens, keep_caches=True)
    policy = FixedPolicy(draft, length)
    fast = generate(model, prompts, new_tokens, drafters=drafters, policy=policy, lengths=lengths, keep_caches=True)
    assert fast.tokens == plain.tokens
    for mine, theirs in zip(fast.caches, plain.caches, strict=True):
        for (keys, values), (plain_keys, plain_values) in zip(mine, theirs, strict=True):
            assert keys.shape == plain_keys.shape
            assert torch.allclose(keys, plain_keys, rtol=0, atol=1e-12)
            assert torch.allclose(values, plain_values, rtol=0, atol=1e-12)


def test_sliding_windows_hold_in_drafts():
    model = TransformersModel(gemma())
    prompts = prompts_of(3, 3)
    plain = generate(model, prompts, 20)
    fast = generate(model, prompts, 20, drafters={"lookup": LookupDrafter(2)}, policy=FixedPolicy("lookup", 4))
    assert fast.tokens == plain.tokens


@pytest.mark.parametrize(("right", "tokens"), [(True, 5), (False, 1)])
def test_drafts_that_are_always_or_never_accepted(target, right, tokens):
    prompts = prompts_of(1, 3)
    plain = generate(target, prompts, 20)
    answers = [tuple(prompt) + new for prompt, new in zip(prompts, plain.tokens, strict=True)]
    policy = FixedPolicy("oracle", 4)
    fast = generate(target, prompts, 20, drafters={"oracle": Oracle(answers, right)}, policy=policy)
    assert fast.tokens == plain.tokens
    assert set(fast.cycle_tokens) == {(tokens,) * 3}
    assert fast.cycles == 20 // tokens
    assert fast.acceptance["oracle"].interval(4).mid == float(right)


def test_stop_tokens_inside_drafts_end_a_sequence(target):
    prompts = prompts_of(2, 4)
    free = generate(target, prompts, 20).tokens
    stop = {tokens[6] for tokens in free[:2]}
    plain = generate(target, prompts, 20, stop=stop, keep_caches=True)
    assert min(map(len, plain.tokens)) <= 7
    answers = [tuple(prompt) + new for prompt, new in zip(prompts, free, strict=True)]
    fast = generate(
        target,
        prompts,
        20,
        stop=stop,
        drafters={"oracle": Oracle(answers, True)},
        policy=FixedPolicy("oracle", 5),
        keep_caches=True,
    )
    assert fast.tokens == plain.tokens
    assert [c[0][0].shape for c in fast.caches] == [c[0][0].shape for c in plain.caches]


def test_drafts_of_the_same_weights_are_mostly_accepted(packed):
    model, drafters = packed
    run = generate(model, prompts_of(5, 4), 20, drafters=drafters, policy=FixedPolicy("A8", 3))
    counts = run.acceptance["A8"]
    assert counts.interval(3).mid > 0.5
    assert run.cycles < 20


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("certain", [False, True])
def test_sampled_tokens_have_the_target_s_distribution(certain):
    draws, size = 100_000, 8
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.rand((2, 3, size), generator=generator, dtype=torch.float64).softmax(-1) ** 2
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    if certain:
        draft = torch.nn.functional.one_hot(draft.argmax(-1), size).double()
    drafts_BL = torch.stack([torch.multinomial(draft[i], draws, True, generator=generator) for i in range(2)], 1)
    lengths_B = torch.full((draws,), 2)
    accepted_B, next_B = verify_sampled(
        drafts_BL, draft[:2].expand(draws, 2, size), target.expand(draws, 3, size), lengths_B, generator
    )
    # Positions are independent here, so the tokens at each one must have its distribution.
    first = torch.where(accepted_B >= 1, drafts_BL[:, 0], next_B)
    reached = accepted_B >= 1
    second = torch.where(accepted_B == 2, drafts_BL[:, 1], next_B)[reached]
    third = next_B[accepted_B == 2]
    for tokens, probabilities in zip((first, second, third), target, strict=True):
        # 99.99 % of chi-square with 7 degrees of freedom is 29.9.
        assert chi_square(torch.bincount(tokens, minlength=size).double(), probabilities) < 29.9
    expected = torch.minimum(target[0], draft[0]).sum()
    assert float(reached.double().mean()) == pytest.approx(float(expected), abs=0.01)


def test_sampled_sequences_have_the_distribution_of_plain_ones(target):
    """Pairs of new tokens of many equal prompts: a two-sample chi-square."""
    rows, prompts = 1500, [[3, 1, 4]] * 1500
    sampling = Sampling(temperature=0.05, top_k=3)
    tables = []
    for policy in (None, FixedPolicy("self", 2)):
        drafters = {"self": ModelDrafter(TransformersModel(llama(torch.float32).double()))}
        run = generate(
            target,
            prompts,
            2,
            drafters=drafters,
            policy=policy,
            sampling=sampling,
            generator=torch.Generator().manual_seed(7),
        )
        pairs = torch.tensor([a * VOCABULARY + b for a, b in run.tokens])
        tables.append(torch.bincount(pairs, minlength=VOCABULARY**2).double())
    both = tables[0] + tables[1]
    cells = both > 10
    statistic = float((((tables[0] - tables[1]) ** 2) / both.clamp_min(1))[cells].sum())
    degrees = int(cells.sum())
    assert tables[0].sum() == rows
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_sampling_filters():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert Sampling().probabilities(logits).tolist() == [[1, 0, 0, 0]]
    assert Sampling(temperature=1, top_k=2).probabilities(logits)[0, 2:].tolist() == [0, 0]
    nucleus = Sampling(temperature=1, top_p=0.7).probabilities(logits)[0]
    assert (nucleus > 0).tolist() == [True, True, False, False]
    assert torch.allclose(Sampling(temperature=2.0).probabilities(logits), (logits / 2).softmax(-1))


def test_lookup_takes_the_latest_and_longest_occurrence():
    lookup = LookupDrafter(longest=2)
    assert lookup.find([1, 2, 3, 9, 2, 4, 1, 2], 3) == [3, 9, 2]
    assert lookup.find([5, 1, 5, 2, 5], 2) == [2, 5]
    assert lookup.find([1, 2, 3], 4) == []
    assert lookup.find([1], 4) == []


def test_ragged_lengths_ignore_padding():
    logits = torch.zeros((2, 4, 5))
    logits[..., 2] = 1
    drafts = torch.full((2, 3), 2)
    accepted, following = verify_greedily(drafts, logits, torch.tensor([3, 1]))
    assert accepted.tolist() == [3, 1]
    assert following.tolist() == [2, 2]


def test_a_controller_drives_the_cycles(packed):
    model, drafters = packed
    acceptance = Acceptance(low=0.9)
    choices = tuple(Choice(draft="A8", length=n, draft_ns=40, verify_ns=105, acceptance=acceptance) for n in (1, 3))
    regime = Regime(name="b4", weight=1.0, plain_ns=100, choices=choices)
    problem = Problem(name="p", memory_kib=0, confidence="low", drafts={"A8": Draft(memory_kib=0)}, regimes=(regime,))
    controller = Controller(problem, "b4", [("A8", 1), ("A8", 3)])
    prompts = prompts_of(6, 4)
    run = generate(model, prompts, 16, drafters=drafters, policy=controller)
    assert run.tokens == generate(model, prompts, 16).tokens
    assert run.acceptance["A8"].judged[0] > 0


def test_faults_are_named(target):
    nan = torch.full((1, 2, 4), torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        verify_greedily(torch.zeros((1, 1), dtype=torch.int64), nan, torch.tensor([1]))
    cache = target.new_cache(1, 2)
    with pytest.raises(NotReadyError, match="cache is full"):
        target.logits(torch.zeros((1, 3), dtype=torch.int64), torch.arange(3)[None], cache)
    for arguments, text in (
        (([], 3), "prompts is empty"),
        (([[]], 3), "prompts is empty"),
        (([[1]], 0), "new_tokens is 0"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            generate(target, *arguments)
    with pytest.raises(UnsupportedError, match="lengths is"):
        generate(target, [[1]], 3, lengths=[1, 2])
    with pytest.raises(UnsupportedError, match="drafters has none"):
        generate(target, [[1]], 3, policy=FixedPolicy("A8", 2))
    with pytest.raises(UnsupportedError, match="has room for 16"):
        generate(target, [[1]], 30, policy=FixedPolicy("A8", 20))
    with pytest.raises(UnsupportedError, match="temperature"):
        Sampling(temperature=-1)
    with pytest.raises(UnsupportedError, match="no linear layer"):
        pack_linears(torch.nn.ReLU())
