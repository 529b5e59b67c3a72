"""Packed token ids and the small facts of the wire types."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core import wire


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_survive_packing(ids):
    data = wire.pack_ids(ids)
    assert len(data) == 4 * len(ids)
    assert wire.unpack_ids(data).tolist() == ids


def test_packed_ids_are_little_endian():
    assert wire.pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_an_array_packs_like_a_list():
    assert wire.pack_ids(np.array([5, 6], np.int32)) == wire.pack_ids([5, 6])


def test_unpacked_ids_are_read_only():
    ids = wire.unpack_ids(wire.pack_ids([1, 2]))
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 3


def test_an_id_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        wire.pack_ids([2**31])


def life(group, nonce):
    return wire.Incarnation(rank=wire.RankId(group=group), endpoint="h:1", nonce=nonce)


def test_a_route_is_unified_only_within_one_life():
    one, reborn = life("unified", "a"), life("unified", "b")
    assert wire.Route(room=1, prefill=one, decode=one).unified
    assert not wire.Route(room=1, prefill=one, decode=reborn).unified


def test_names_for_logs():
    assert str(life("decode", "n")) == "decode/0/0@h:1#n"


@pytest.mark.parametrize(("owned", "whole"), [(3, True), (2, False), (4, False)])
def test_pages_add_up_or_leaked(owned, whole):
    assert wire.PageAccount(total=10, free=5, cached=2, owned=owned).whole is whole
