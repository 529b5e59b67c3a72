"""The boundary between prefill and decode, with a real model: what crosses, and what does not."""

from __future__ import annotations

import ctypes

import pytest

from core.wire import Role, Usage
from disagg.transport.base import Copy
from disagg.transport.inproc import Hub
from tests.support.eventually import run_tidy
from tests.support.pd_hosts import pd_hosts
from tests.support.real_engine import generate, tokens, unified_engine
from tests.support.tiny_models import TINY_MOE


def words(start: int, count: int) -> list[int]:
    return [100 + (start + 7 * i) % 3000 for i in range(count)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_of_a_conversation_only_new_tokens_cross(page_size):
    """And one more in each turn: the KV of an answer's last token was never computed.

    With pages of 16 both ranks copy what they have of a conversation's last page.
    """

    async def main() -> None:
        async with pd_hosts(TINY_MOE, local_prefill="off", page_size=page_size) as pair:
            assert (await pair.status(Role.DECODE)).info.page_size == page_size
            each = (await pair.status(Role.PREFILL)).info.kv_bytes_per_token
            prompt, before = words(0, 40), 0
            for turn in range(10):
                said = await pair.tokens(prompt, 8)
                sent = (await pair.transfers(Role.PREFILL)).moved_bytes
                assert sent == (await pair.transfers(Role.DECODE)).moved_bytes
                new = 40 if turn == 0 else 1 + turn
                assert sent - before == each * new, turn
                before = sent
                prompt = [*prompt, *said.ids, *words(1000 * turn, turn + 1)]
            report = await pair.transfers(Role.DECODE)
            assert report.placed == {"remote_off": 10}
            assert report.delta_tokens * each == sent
            answers.append(prompt)
            await pair.at_rest()
            status = await pair.status(Role.DECODE)
            load, total = status.load, 4096 // page_size
            assert load.total_pages == status.info.total_pages == status.pages.total == total
            assert load.free_pages + load.cached_pages == total
            assert load.cached_pages == status.pages.cached

    answers: list[list[int]] = []
    run_tidy(main)
    plain = generate(unified_engine(TINY_MOE), [words(0, 40)], 8, ignore_eos=True)
    assert answers[0][40:48] == tokens(plain[0])


def test_short_remainders_are_computed_by_the_decode_rank_and_give_the_same_answer():
    async def conversation(local_prefill: int | str) -> tuple[list[list[int]], list[Usage], dict]:
        async with pd_hosts(TINY_MOE, local_prefill=local_prefill) as pair:
            prompt, outputs, usages = words(0, 40), [], []
            for turn in range(4):
                said = await pair.tokens(prompt, 8, prompt_logprobs=0 if turn == 3 else None)
                outputs.append(said.ids)
                usages.append(said.usage)
                assert len(said.scores) == (len(prompt) - 1 if turn == 3 else 0)
                prompt = [*prompt, *said.ids, *words(1000 * turn, 5)]
            return outputs, usages, (await pair.transfers(Role.DECODE)).placed

    async def main() -> None:
        off, plain_usages, _ = await conversation("off")
        kept, usages, placed = await conversation(20)
        assert kept == off
        assert placed == {"remote_first": 1, "local": 2, "remote_long": 1}  # scores take it all
        # either rank may be the first to have the first token; the prefill rank lacks the answers
        found = [u.cached_tokens for u in usages]
        assert found in ([0, a, b, 0] for a in (40, 47) for b in (40, 53, 60))
        assert [u.prompt_tokens for u in usages] == [u.prompt_tokens for u in plain_usages]

    run_tidy(main)


def test_ranks_of_another_dtype_are_told_apart_in_the_answer():
    async def main() -> None:
        async with pd_hosts(TINY_MOE, decode_dtype="bfloat16", local_prefill=50) as pair:
            answer = await pair.post(words(0, 20), 16)
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "dtype is 'float32' at the prefill rank, 'bfloat16' at the decode" in message
            assert "slot_bytes" in message
            ready = await pair.http.get("/ready")
            assert ready.status_code == 503
            assert "dtype is 'float32'" in ready.text
            status = (await pair.http.get("/status")).json()
            assert "not in effect: KV geometry differs" in status["serving"]
            await pair.at_rest()

    run_tidy(main)


def test_ranks_of_another_page_size_are_told_apart():
    """The configuration refuses it; ranks do too, should they ever meet."""

    async def main() -> None:
        async with pd_hosts(TINY_MOE, page_size=16, decode_page_size=4) as pair:
            answer = await pair.post(words(0, 20), 16)
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "page_size is 16 at the prefill rank, 4 at the decode rank" in message
            await pair.at_rest()

    run_tidy(main)


class Corrupting(Hub):
    """Changes a bit of the next copy to land, once it is ``armed``."""

    armed = False

    def _land(self, copy: Copy, data: bytes) -> None:
        super()._land(copy, data)
        if self.armed:
            self.armed = False
            ctypes.c_ubyte.from_address(copy.target).value ^= 0x10


def test_kv_that_changed_on_the_way_is_found_and_sent_again():
    hub = Corrupting()

    async def main() -> None:
        async with pd_hosts(TINY_MOE, hub=hub, local_prefill="off", checksum="all") as pair:
            hub.armed = True
            said = await pair.tokens(words(3, 30), 6)
            assert not hub.armed
            again = await pair.tokens(words(3, 30), 6)
            assert said.ids == again.ids
            report = await pair.transfers(Role.DECODE)
            assert report.failed == {"checksum": 1}
            assert report.checked == 2

    run_tidy(main)


def test_status_and_metrics_say_what_is_in_effect():
    async def main() -> None:
        async with pd_hosts(TINY_MOE, local_prefill=20) as pair:
            for turn in range(3):
                await pair.tokens(words(turn, 10), 3)
            status = (await pair.http.get("/status")).json()
            assert status["serving"] == "prefill/decode over mooncake tcp"
            (decode,) = [rank for rank in status["ranks"] if rank["role"] == "decode"]
            assert decode["transfers"]["placed"]["local"] >= 2
            assert decode["transfers"]["placed"]["remote_first"] == 1

    run_tidy(main)
