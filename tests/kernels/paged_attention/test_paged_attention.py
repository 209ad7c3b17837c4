import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.decoder import rotate_into_pages
from qsync_opt.kernels.paged_attention import explain, from_halves, in_halves, paged_attention, to_codes

PAGE = 16


def case(contexts, *, kv_heads=2, group=2, size=64, dtype=torch.float64, device="cpu", seed=0):
    """Queries, pages that are in no order, and what sequences have in them; pages that none has hold NaN."""
    draw = torch.Generator().manual_seed(seed)
    widths = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(widths) + 3, generator=draw)
    pool = torch.full((2, kv_heads, len(order) * PAGE, size), torch.nan, dtype=torch.float64)
    table = torch.full((len(contexts), max(widths) + 1), order[-1])
    texts = []
    for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
        pages, order = order[:width], order[width:]
        table[row, :width] = pages
        text = torch.randn((2, kv_heads, context, size), generator=draw, dtype=torch.float64).to(dtype)
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:context]
        pool[:, :, slots] = text.double()
        texts.append(text.double())
    q = torch.randn((len(contexts), group * kv_heads, size), generator=draw, dtype=torch.float64).to(dtype)
    tensors = q, pool.to(dtype), table, torch.tensor(contexts)
    return tuple(tensor.to(device) for tensor in tensors), texts


def one_by_one(q, texts, scale, window):
    """The same by torch, sequence by sequence and head by head."""
    rows = []
    for queries, (keys, values) in zip(q.double().cpu(), texts, strict=True):
        begin = 0 if window is None else max(0, keys.shape[1] - window)
        group = len(queries) // len(keys)
        rows.append(
            torch.stack(
                [
                    torch.softmax(keys[h // group, begin:] @ query * scale, 0) @ values[h // group, begin:]
                    for h, query in enumerate(queries)
                ]
            )
        )
    return torch.stack(rows)


@given(
    contexts=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 80),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
)
def test_the_specification_is_attention_over_what_a_sequence_has(contexts, window, kv_heads, group):
    tensors, texts = case(contexts, kv_heads=kv_heads, group=group, size=8)
    expected = one_by_one(tensors[0], texts, 0.3, window)
    torch.testing.assert_close(paged_attention(*tensors, scale=0.3, window=window), expected)


def with_codes(pool):
    """The pages as codes in halves and scales."""
    codes, scales = to_codes(pool)
    return in_halves(codes), scales


def some_tokens(q, tokens):
    """So many tokens of each sequence, the last of which is the one there is."""
    draw = torch.Generator().manual_seed(3)
    before = torch.randn((len(q), tokens - 1, *q.shape[1:]), generator=draw, dtype=torch.float64).to(q)
    return torch.cat([before, q[:, None]], 1).flatten(0, 1)


def test_halves_hold_every_code():
    codes = torch.arange(-128, 128).to(torch.int8).view(2, 128)
    assert torch.equal(from_halves(in_halves(codes)), codes.float())
    upper = from_halves(in_halves(codes)[:, :64], upper=True)
    assert torch.equal(upper, (codes & -16).float() + 7.5)
    x = torch.randn(5, 64) * torch.tensor([[1e-3], [1.0], [1e3], [0.0], [1e-42]])
    whole, scales = to_codes(x)
    assert (whole.float() * scales - x).abs().le(scales * 0.501).all() and scales.gt(0).all()


@given(
    contexts=st.lists(st.integers(4, 50), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 60),
    tokens=st.integers(1, 4),
    coded=st.booleans(),
    upper=st.booleans(),
)
def test_several_tokens_are_as_each_by_itself(contexts, window, tokens, coded, upper):
    (q, pool, table, ends), _ = case(contexts, size=8)
    q = some_tokens(q, tokens)
    if coded:
        halves, scales = with_codes(pool.nan_to_num())
        numbers = from_halves(halves[..., :4], upper=True) if upper else from_halves(halves)
        kept = {"scales": scales, "high_halves": upper}
        together = paged_attention(q, halves, table, ends, scale=0.3, window=window, **kept)
        pool = numbers.double() * scales
    else:
        together = paged_attention(q, pool, table, ends, scale=0.3, window=window)
    for k in range(tokens):
        alone = paged_attention(q[k::tokens], pool, table, ends - (tokens - 1 - k), scale=0.3, window=window)
        torch.testing.assert_close(together[k::tokens], alone)


def test_arguments_that_do_not_fit_are_named():
    tensors, _ = case([5])
    q, pool, table, contexts = tensors
    with pytest.raises(UnsupportedError, match="heads a multiple"):
        paged_attention(q[:, :3], pool, table, contexts, scale=1.0)
    with pytest.raises(UnsupportedError, match=r"in torch.float32 .* in torch.float64"):
        paged_attention(q.float(), pool, table, contexts, scale=1.0)
    with pytest.raises(UnsupportedError, match="window is 0"):
        paged_attention(*tensors, scale=1.0, window=0)
    with pytest.raises(UnsupportedError, match="backend is 'fast', but allowed are auto, compiled, reference"):
        paged_attention(*tensors, scale=1.0, backend="fast")
    with pytest.raises(UnsupportedError, match="there is no kernel for cpu"):
        paged_attention(*tensors, scale=1.0, backend="compiled")
    halves, scales = with_codes(pool)
    for named, arguments, kept in (
        ("in torch.uint8", tensors, {"scales": scales}),
        (r"scales have the shape .* but the pages need", (q, halves, table, contexts), {"scales": scales[..., 0]}),
        ("high_halves is set", tensors, {"high_halves": True}),
        ("as many of each", (torch.cat([q, q, q])[:2], pool, table.expand(3, -1), contexts), {}),
    ):
        with pytest.raises(UnsupportedError, match=named):
            paged_attention(*arguments, scale=1.0, **kept)
    assert "kernels are for" in explain(torch.device("cuda"), torch.float32, 64)
    assert "heads have 96 numbers" in explain(torch.device("cuda"), torch.float16, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 4), (8, 4), (2, 1), (2, 7), (1, 16)])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_compiled_attention_is_near_the_specification(dtype, size, kv_heads, group, window):
    contexts = [1, 63, 64, 65, 128, 300, 17]
    tensors, _ = case(contexts, kv_heads=kv_heads, group=group, size=size, dtype=dtype, device="cuda")
    result = paged_attention(*tensors, scale=size**-0.5, window=window, backend="compiled")
    expected = paged_attention(*tensors, scale=size**-0.5, window=window, backend="reference")
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected)  # of 16 bits: one rounding of a result of FP32 sums


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("kept", ["numbers", "codes", "upper"])
def test_compiled_attention_of_tokens_and_codes(dtype, size, tokens, group, window, kept):
    contexts = [9, 63, 65, 511, 512, 513, 1200]
    (q, pool, table, ends), _ = case(contexts, group=group, size=size, dtype=dtype, device="cuda")
    q, more = some_tokens(q, tokens), {}
    if kept != "numbers":
        pool, scales = with_codes(pool)
        more = {"scales": scales, "high_halves": kept == "upper"}
    arguments = q, pool, table, ends
    result = paged_attention(*arguments, scale=size**-0.5, window=window, backend="compiled", **more)
    expected = paged_attention(*arguments, scale=size**-0.5, window=window, backend="reference", **more)
    torch.testing.assert_close(result, expected)
    for k in range(tokens):  # the bits of a token decoded by itself
        alone = paged_attention(
            q[k::tokens].contiguous(), pool, table, ends - (tokens - 1 - k), scale=size**-0.5, window=window,
            backend="compiled", **more,
        )  # fmt: skip
        torch.testing.assert_close(result[k::tokens], alone, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_sequence_has_the_same_bits_in_any_batch_and_width():
    contexts = [300, 1, 65, 40, 512, 17, 128, 96] * 4
    tensors, _ = case(contexts, kv_heads=4, group=4, size=128, dtype=torch.bfloat16, device="cuda")
    q, pool, table, ends = tensors
    wider = torch.cat([table, table[:, :1].expand(-1, 100)], 1)
    for window in (None, 70):
        together = paged_attention(*tensors, scale=0.1, window=window, backend="compiled")
        widened = paged_attention(q, pool, wider, ends, scale=0.1, window=window, backend="compiled")
        torch.testing.assert_close(widened, together, rtol=0, atol=0)
        for row in range(8):
            part = slice(row, row + 1)
            alone = paged_attention(
                q[part], pool, table[part], ends[part], scale=0.1, window=window, backend="compiled"
            )
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


@pytest.mark.gpu
def test_queries_may_be_a_part_of_a_product_and_contexts_grow_in_a_graph():
    tensors, _ = case([300, 40], kv_heads=2, group=4, size=128, dtype=torch.bfloat16, device="cuda")
    q, pool, table, ends = tensors
    with_keys = torch.cat([q, q[:, :2]], 1)
    part = torch.split(with_keys, [8, 2], 1)[0]
    assert not part.is_contiguous()
    expected = paged_attention(q, pool, table, ends, scale=0.1, backend="compiled")
    torch.testing.assert_close(
        paged_attention(part, pool, table, ends, scale=0.1, backend="compiled"), expected, rtol=0, atol=0
    )
    contexts = torch.ones_like(ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = paged_attention(q, pool, table, contexts, scale=0.1, backend="compiled")
    contexts.copy_(ends)
    graph.replay()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kept", ["numbers", "codes"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_settled_pages_are_read_early_and_new_tokens_are_not(size, kept, tokens):
    steps, starts = 24, torch.tensor([500, 40, 7], device="cuda")
    (_, pool, table, _), _ = case([600, 140, 100], group=4, size=size, dtype=torch.bfloat16, device="cuda")
    pool, scales = with_codes(pool.nan_to_num(0.0)) if kept == "codes" else (pool, None)
    draw = torch.Generator("cuda").manual_seed(size)
    heads = torch.randn((steps, 3 * tokens, 12, size), generator=draw, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn((3 * tokens, 1, size), generator=draw, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = [(starts + k * tokens)[:, None] + torch.arange(tokens, device="cuda") for k in range(steps)]
    slots = [(table.gather(1, own // PAGE) * PAGE + own % PAGE).flatten() for own in positions]
    contexts = [own[:, -1] + 1 for own in positions]
    torch.cuda.synchronize()
    early, late = [], []
    for k in range(steps):
        q = rotate_into_pages(heads[k].clone(), cos, sin, slots[k], pool, scales)[:, :8]
        how = {"scale": size**-0.5, "scales": scales, "backend": "compiled"}
        early.append(paged_attention(q, pool, table, contexts[k], settled=True, **how))
        late.append(paged_attention(q, pool, table, contexts[k], **how))
    assert torch.isfinite(torch.stack(early)).all()
    torch.testing.assert_close(torch.stack(early), torch.stack(late), rtol=0, atol=0)


@pytest.mark.gpu
def test_what_the_kernel_refuses_is_named():
    tensors, _ = case([20, 3], dtype=torch.bfloat16, device="cuda")
    q, pool, table, ends = tensors
    run = torch.ops.qsync_opt.paged_attention
    paged_attention(*tensors, scale=0.1, backend="compiled")
    with pytest.raises(RuntimeError, match="its rows contiguous"):
        run(q.transpose(0, 1).contiguous().transpose(0, 1), pool, None, table, ends, 0.1, 0, False, False)
    with pytest.raises(RuntimeError, match="contiguous int64"):
        run(q, pool, None, table.int(), ends, 0.1, 0, False, False)
    with pytest.raises(RuntimeError, match="of the type of q"):
        run(q, pool.half(), None, table, ends, 0.1, 0, False, False)
