from __future__ import annotations

from hypothesis import given, strategies as st

from router.text.stop import StopMatcher

stops_of = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
chunks_of = st.lists(st.text("abc", max_size=5), max_size=12)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first prefix of the text that ends with a stop string, without that string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(chunks=chunks_of, stops=stops_of, include=st.booleans())
def test_like_the_naive_search_however_the_text_is_cut(chunks, stops, include):
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        if matcher.matched:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == naive("".join(chunks), stops, include)


@given(chunks=chunks_of, stops=stops_of)
def test_only_the_start_of_a_stop_string_is_held_back(chunks, stops):
    matcher = StopMatcher(stops)
    shown = read = ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        read += chunk
        if matcher.matched:
            break
        held = read[len(shown) :]
        assert shown + held == read
        assert not held or any(stop.startswith(held) for stop in stops)


@given(chunks=st.lists(st.tuples(st.text("ab", max_size=4), st.booleans())), stops=stops_of)
def test_an_unarmed_stop_string_does_not_end_the_text(chunks, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for chunk, armed in chunks:
        shown += matcher.push(chunk, armed=armed)
        if matcher.matched:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == naive_unarmed(chunks, stops)


def naive_unarmed(chunks: list[tuple[str, bool]], stops: list[str]) -> tuple[str, str | None]:
    """As ``naive``, over the ends that count."""
    text = "".join(chunk for chunk, _ in chunks)
    counts = [armed for chunk, armed in chunks for _ in chunk]
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if counts[end - 1] and found:
            return text[: end - len(max(found, key=len))], max(found, key=len)
    return text, None


def test_without_stop_strings_nothing_is_held():
    assert StopMatcher(()).push("abc") == "abc"
