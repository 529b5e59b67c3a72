from __future__ import annotations

import pytest

from core.clock import VirtualClock
from core.errors import Overloaded, RequestError
from router.admission import Admission


def test_places_are_given_back_after_errors_too():
    admission = Admission(3, VirtualClock())
    with admission.ticket(1), admission.ticket(2):
        assert admission.live == 3
        with pytest.raises(Overloaded, match="3 of 3"), admission.ticket(1):
            pass
    with pytest.raises(KeyError), admission.ticket(3):
        raise KeyError
    assert admission.live == 0


def test_what_never_fits_is_the_callers_error():
    with (
        pytest.raises(RequestError, match="queue_limit"),
        Admission(3, VirtualClock()).ticket(4),
    ):
        pass


def test_the_time_to_come_back_follows_how_long_requests_live():
    clock = VirtualClock()
    admission = Admission(1, clock)
    waits = []
    for lifetime_s in (0.1, 100.0, 1e6):
        with admission.ticket(1):
            clock.advance(lifetime_s)
        with admission.ticket(1), pytest.raises(Overloaded) as caught, admission.ticket(1):
            pass
        waits.append(caught.value.retry_after_s)
    assert waits[0] == 1.0
    assert 1.0 < waits[1] < 30.0
    assert waits[2] == 30.0
