from __future__ import annotations

import asyncio
import threading

from core.rpc.hop import Hop


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    wakes = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_one_wake_up_for_all_of_a_step_in_order():
    loop = CountingLoop()
    try:
        heard: list[int] = []
        hop = Hop(loop, heard.append)
        for step in range(2):
            thread = threading.Thread(target=lambda: [hop.put(i) for i in range(50)])
            thread.start()
            thread.join()
            assert loop.wakes == step + 1
            loop.run_until_complete(asyncio.sleep(0))
        assert heard == [*range(50), *range(50)]
        hop.put(1)
        hop.close()
        hop.put(2)
        loop.run_until_complete(asyncio.sleep(0))
        assert len(heard) == 100
    finally:
        loop.close()


def test_putting_after_the_loop_has_ended_is_harmless():
    loop = asyncio.new_event_loop()
    hop = Hop(loop, print)
    hop.close()
    loop.close()
    hop.put(1)
