"""Keys that sequences of a step have in common are read once, and no result changes."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from worker.attention.cpu_plan import Sequences
from worker.attention.registry import ATTENTION

pytestmark = pytest.mark.skipif("cpu" not in ATTENTION.usable(), reason="no C++ compiler here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SCALE = 0.2
BLOCK = 256  # of heads up to 256 wide; else half of it
SHAPES = {  # heads, key-value heads, width of a key, of a value; MLA's values are part of its keys
    "gqa": (6, 2, 64, 64),
    "mla": (5, 1, 288, 256),
}


def family(tree):
    """Spans and slots of sequences that branch off each other.

    A row is (the earlier row it branches off, after how many tokens, own tokens before the step's,
    tokens of the step).
    """
    rows, spans, query, start, fresh = [], [], 0, 0, 0
    for parent, cut, own, n in tree:
        prefix = rows[parent % len(rows)][:cut] if rows else []
        rows.append([*prefix, *range(fresh, fresh + own + n)])
        fresh += own + n
        spans.append((query, query + n, start, start + len(rows[-1])))
        query, start = query + n, start + len(rows[-1])
    shuffled = torch.randperm(fresh, generator=torch.Generator().manual_seed(fresh))
    return spans, shuffled[torch.tensor(list(chain.from_iterable(rows)))]


def draw(spans, slots, shape, dtype):
    torch.manual_seed(len(slots))
    heads, kv_heads, dim, v_dim = shape
    q = torch.randn(spans[-1][1], heads, dim).to(dtype)
    k = torch.randn(int(slots.max()) + 1, kv_heads, dim).to(dtype)
    return q, k, k[..., :v_dim] if kv_heads == 1 else torch.randn_like(k)


def alone_and_shared(tree, shape, dtype):
    spans, slots = family(tree)
    q, k, v = draw(spans, slots, shape, dtype)
    alone = Sequences.of(spans, slots, share=False).attend(q, k, v, SCALE)
    return alone, Sequences.of(spans, slots).attend(q, k, v, SCALE)


# a trunk of four blocks, two branches of two more, one of them forked again; and a stranger
DEEP = [
    (0, 0, 1030, 1),
    (0, 1030, 600, 1),
    (1, 1600, 3, 2),
    (1, 1600, 300, 1),
    (3, 1900, 10, 1),
    (0, 1030, 520, 1),
    (5, 1545, 1, 7),
    (5, 1540, 90, 40),
    (0, 0, 700, 1),
]
trees = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 900),
        st.one_of(st.integers(0, 5), st.integers(0, 400)),
        st.sampled_from([1, 1, 1, 2, 30]),
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_deep_tree_changes_no_bit(shape, dtype, threads):
    alone, shared = alone_and_shared(DEEP, shape, dtype)
    assert torch.equal(shared, alone)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_many_rows_of_one_prefix_change_no_bit(shape, dtype, threads):
    """So many that a node is several tasks."""
    tree = [(0, 0, 600, 1), *[(0, 600, i % 3, 1 + 15 * (i % 2)) for i in range(40)]]
    alone, shared = alone_and_shared(tree, shape, dtype)
    assert torch.equal(shared, alone)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=12)
@given(tree=trees, threads=st.sampled_from([1, 2]))
def test_no_tree_changes_a_bit(shape, dtype, tree, threads):
    torch.set_num_threads(threads)
    try:
        alone, shared = alone_and_shared(tree, shape, dtype)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(shared, alone)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_node_is_read_once(shape, threads):
    """Told that two sequences have a block in common, the kernel reads the slots of one alone."""
    spans, slots = family([(0, 0, 700, 1), (0, 0, 800, 1)])
    q, k, v = draw(spans, slots, shape, torch.float32)
    block = BLOCK if shape[2] <= 256 else BLOCK // 2
    claimed = torch.tensor([0, 1]), torch.tensor([[0, 2, 0, 1], [0, 2, 1, 2]])
    told = Sequences(torch.tensor(spans), slots, True, {shape[2]: claimed})
    swapped = slots.clone()
    swapped[: 2 * block] = slots[701 : 701 + 2 * block]
    expected = Sequences.of(spans, swapped, share=False).attend(q, k, v, SCALE)
    assert torch.equal(told.attend(q, k, v, SCALE), expected)


def blocks_of(tree, spans):
    """(sequences, block) of every block that a tree reads once."""
    order, nodes = tree
    assert sorted(order.tolist()) == list(range(len(spans)))
    found, done = set(), [0] * len(spans)
    for first, end, begin, stop in nodes.tolist():
        members = order[first:end].tolist()
        assert [done[member] for member in members] == [begin] * len(members)
        for member in members:
            done[member] = stop
        found |= {(frozenset(members), block) for block in range(begin, stop)}
    return found


def shared_blocks(spans, slots, block):
    """The same, by comparing everything with everything."""
    found = set()
    for first, stop, start, end in spans:
        for at in range((end - start - (stop - first) + 1) // block):
            head = slots[start : start + (at + 1) * block]
            members = frozenset(
                i
                for i, (one, two, begin, last) in enumerate(spans)
                if last - begin - (two - one) + 1 >= len(head)
                and torch.equal(slots[begin : begin + len(head)], head)
            )
            if len(members) > 1:
                found.add((members, at))
    return found


@pytest.mark.parametrize("dim", [64, 512])
def test_a_deep_tree_is_found(dim):
    spans, slots = family(DEEP)
    tree = torch.ops.antiphon.prefix_tree(torch.tensor(spans), slots, dim)
    block = BLOCK if dim == 64 else BLOCK // 2
    assert blocks_of(tree, spans) == shared_blocks(spans, slots, block)
    assert len(tree[1]) == 4


@pytest.mark.parametrize("dim", [64, 512])
@settings(max_examples=50)
@given(tree=trees)
def test_every_shared_block_is_found(dim, tree):
    spans, slots = family(tree)
    found = torch.ops.antiphon.prefix_tree(torch.tensor(spans), slots, dim)
    assert blocks_of(found, spans) == shared_blocks(spans, slots, BLOCK if dim == 64 else 128)


@settings(max_examples=50)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=2, max_size=9),
    torn=st.lists(st.integers(0, 20_000), max_size=3),
    n=st.integers(1, 3),
)
def test_slots_are_compared_to_the_last(words, torn, n):
    """Blocks may agree in their ends and differ in between, or end in queries that see less."""
    pieces = [torch.arange(256) + 1000 * letter for word in words for letter in word]
    slots = torch.cat(pieces)
    for place in torn:
        slots[place % len(slots)] = 7000
    ends = torch.tensor([0, *(256 * len(word) for word in words)]).cumsum(0).tolist()
    spans = [(n * i, n * (i + 1), start, end) for i, (start, end) in enumerate(pairwise(ends))]
    found = torch.ops.antiphon.prefix_tree(torch.tensor(spans), slots, 64)
    assert blocks_of(found, spans) == shared_blocks(spans, slots, 256)


@pytest.mark.parametrize(
    ("order", "nodes"),
    [
        ([0, 0], []),
        ([0, 2], []),
        ([0], []),
        ([0, 1], [[0, 3, 0, 1]]),
        ([0, 1], [[-1, 2, 0, 1]]),
        ([0, 1], [[0, 2, 1, 2]]),
        ([0, 1], [[0, 2, 0, 0]]),
        ([0, 1], [[0, 2, 0, 3]]),
        ([0, 1], [[0, 2, 0, 1], [0, 2, 0, 1]]),
    ],
    ids=str,
)
def test_a_tree_of_another_step_is_an_error_and_no_crash(order, nodes):
    spans, slots = family([(0, 0, 600, 1), (0, 0, 800, 1)])
    q, k, v = draw(spans, slots, SHAPES["gqa"], torch.float32)
    tree = torch.tensor(order), torch.tensor(nodes, dtype=torch.int64).view(-1, 4)
    with pytest.raises(RuntimeError, match=r"does not fit|outside|a tree of this step"):
        torch.ops.antiphon.attention(q, k, v, torch.tensor(spans), slots, SCALE, *tree)
