"""Copies between two pools against a copier that moves one slot at a time."""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from disagg.geometry import PageGeometry, copies, mismatch

GEOMETRY = PageGeometry(kind="mha", slot_bytes=(8, 8), dtype="bfloat16", revision="r1")


def pool(sizes, slots, fill):
    return [np.full((slots, size), fill, dtype=np.uint8) for size in sizes]


def bases(regions):
    return [region.ctypes.data for region in regions]


@given(
    st.lists(st.sampled_from([1, 4, 24]), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=16, unique_by=lambda p: p[1]
    ),
    st.randoms(use_true_random=False),
)
def test_copies_move_what_a_naive_copier_moves(sizes, pairs, rng):
    geometry = PageGeometry(kind="mla", slot_bytes=tuple(sizes), dtype="float32", revision="r")
    sources = np.array([s for s, _ in pairs], dtype=np.int32)
    targets = np.array([t for _, t in pairs], dtype=np.int32)
    source, target, naive = pool(sizes, 16, 0), pool(sizes, 16, 0), pool(sizes, 16, 0)
    for region in source:
        region[:] = np.frombuffer(rng.randbytes(region.nbytes), np.uint8).reshape(region.shape)
    for copy in copies(geometry, bases(source), sources, bases(target), targets):
        ctypes.memmove(copy.target, copy.source, copy.length)
    for region, wanted in zip(source, naive, strict=True):
        for s, t in pairs:
            wanted[t] = region[s]
    for got, wanted in zip(target, naive, strict=True):
        assert (got == wanted).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_runs_consecutive_on_both_sides_become_one_copy_a_region(runs):
    sources, targets, at, to = [], [], 0, 200
    for length in runs:
        sources += range(at, at + length)
        targets += range(to, to + length)
        at, to = at + length + 1, to - 20
    arrays = np.array(sources, np.int32), np.array(targets, np.int32)
    got = copies(GEOMETRY, (1000, 5000), arrays[0], (9000, 20000), arrays[1])
    assert len(got) == 2 * len(runs)
    assert [copy.length for copy in got] == [8 * length for length in runs] * 2


def test_large_addresses_do_not_overflow():
    big = PageGeometry(kind="mla", slot_bytes=(70_272,), dtype="bfloat16", revision="r")
    slot = np.array([2_000_000], np.int32)
    (copy,) = copies(big, (1 << 46,), slot, (1 << 45,), slot)
    assert copy == ((1 << 46) + 2_000_000 * 70_272, (1 << 45) + 2_000_000 * 70_272, 70_272)


def test_equal_geometries_agree():
    assert mismatch(GEOMETRY, msgspec.structs.replace(GEOMETRY)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "mla"),
        ("slot_bytes", (8, 16)),
        ("dtype", "float32"),
        ("revision", "r2"),
        ("page_size", 16),
        ("tp_rank", 1),
        ("tp_size", 2),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(field, value):
    other = msgspec.structs.replace(GEOMETRY, **{field: value})
    words = mismatch(GEOMETRY, other)
    assert words is not None
    assert field in words
    assert f"{_shown(getattr(GEOMETRY, field))} at the prefill rank" in words
    assert f"{_shown(value)} at the decode rank" in words


def _shown(value):
    return repr(f"{sum(value)} bytes in 2 regions") if isinstance(value, tuple) else repr(value)


@pytest.mark.parametrize(
    ("start", "stop", "pages"),
    [(0, 0, 0), (5, 5, 0), (0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 5, 2), (4, 8, 1), (5, 6, 1)],
)
def test_pages_that_tokens_lie_in(start, stop, pages):
    assert msgspec.structs.replace(GEOMETRY, page_size=4).pages(start, stop) == pages
    assert GEOMETRY.pages(start, stop) == stop - start
