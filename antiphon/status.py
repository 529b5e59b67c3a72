"""``antiphon status``: fetch what a router says of its ranks and draw it as a table."""

from __future__ import annotations

from collections import Counter

from antiphon.remote import Json, Remote

COLUMNS = (
    "rank", "state", "running", "waiting", "handoffs", "cache", "free", "hits",
    "out tok", "KV sent", "KV received", "up",
)  # fmt: skip


def fetch(router: Remote) -> Json:
    """GET /status; raises as ``Remote.ask`` does."""
    return router.ask("/status")


def render(status: Json) -> str:
    """One line on the whole, then a table with a line for each rank, by group."""
    state = "ready" if status["ready"] else f"NOT READY: {status['reason']}"
    rows = [COLUMNS, *(_row(rank) for rank in status["ranks"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    head = [f"{status['model']}: {state}", status["serving"], *_prompts(status["ranks"])]
    return "\n".join([*head, "", *(line.rstrip() for line in lines), *_crashes(status["ranks"])])


def _prompts(ranks: list[Json]) -> list[str]:
    """Where prompts were computed, of all decode ranks together; nothing where none was.

    Each rank counts from its own start: what a rank that is gone had done is not in it.
    """
    placed: Counter[str] = Counter()
    for rank in ranks:
        placed.update((rank.get("transfers") or {}).get("placed", {}))
    if not placed:
        return []
    local = placed.pop("local", 0)
    why = ", ".join(f"{name.removeprefix('remote_')} {count}" for name, count in placed.items())
    since = "prompts since the ranks started"
    return [f"{since}: {placed.total()} handed over ({why}), {local} computed by decode ranks"]


def _crashes(ranks: list[Json]) -> list[str]:
    """Of each rank that crashed lately: how often, why, and when it is tried again."""
    told = [f"{rank['rank']}: {words}" for rank in ranks if (words := _life(rank))]
    return ["", *told] if told else []


def _life(rank: Json) -> str:
    """One rank's crashes in words; empty where it had none."""
    life = rank.get("life")
    if not life or not life["crashes"]:
        return ""
    times = "1 crash" if life["crashes"] == 1 else f"{life['crashes']} crashes in a row"
    again = "" if life["retry_s"] is None else f", tried again in {life['retry_s']:.0f} s"
    return f"{times}{again}; the last: {life['problem']}"


def _row(rank: Json) -> tuple[str, ...]:
    if rank["state"] != "up":
        state, reason = rank["state"], rank.get("reason", "")
        if "stuck_s" in rank:
            state = f"stuck for {rank['stuck_s']:.0f} s"
        return (rank["rank"], f"{state} {reason}".strip(), *[""] * (len(COLUMNS) - 2))
    load, pages = rank["load"], rank["pages"]
    total = pages["total"]
    hits = load["cached_tokens"] / load["prompt_tokens"] if load["prompt_tokens"] else 0.0
    return (
        rank["rank"],
        "up",
        str(load["running_requests"]),
        str(load["waiting_requests"]),
        str(load["handoff_requests"]),
        f"{pages['cached'] / total:.0%} of {total}",
        f"{pages['free'] / total:.0%}",
        f"{hits:.0%}",
        str(load["output_tokens"]),
        _bytes(load["kv_bytes_sent"]),
        _bytes(load["kv_bytes_received"]),
        f"{rank['uptime_s']:.0f} s",
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
