"""What does text cost between the turns of a chat? Tokens that cross again because they changed.

    python -m bench.chat_delta [--url http://127.0.0.1:8000] [--turns 10]

Talks to a running prefill/decode cluster that nobody else uses; start it with
disagg.local_prefill=off. A client sends the answers back as text: where template and tokenizer
make other token ids of it than the model said, everything behind the first difference crosses
anew. With token ids instead of text, only what is new would. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import httpx

QUESTIONS = (
    "Tell me about the city of Lisbon.",
    "What can one eat there?",
    "And where are the best views?",
    "How do I get there from Porto?",
    "Name three museums.",
    "Which one is for children?",
    "What does a ticket cost?",
    "Is it open on Mondays?",
    "What is the weather like in May?",
    "Thank you! Sum it up in one sentence.",
)

Json = dict[str, Any]  # opaque: parsed JSON


def transfers(client: httpx.Client) -> tuple[int, int]:
    """(tokens of announced prompts, tokens that crossed) of all decode ranks so far."""
    found = [
        rank["transfers"]
        for rank in client.get("/status").json()["ranks"]
        if rank["role"] == "decode"
    ]
    return sum(f["prompt_tokens"] for f in found), sum(f["delta_tokens"] for f in found)


def main(words: Sequence[str]) -> int:
    """Hold the conversation and print what crossed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, at most")
    options = parser.parse_args(words)
    messages: list[Json] = []
    known = 0  # tokens of the last prompt and its answer
    total = again = 0
    print("| turn | prompt | new | crossed | again |\n| ---: | ---: | ---: | ---: | ---: |")
    with httpx.Client(base_url=options.url, timeout=120, trust_env=False) as client:
        for turn in range(options.turns):
            messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
            before = transfers(client)
            body = {"messages": messages, "max_tokens": options.tokens, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            said = answer.json()
            messages.append(said["choices"][0]["message"])
            asked, moved = (a - b for a, b in zip(transfers(client), before, strict=True))
            usage = said["usage"]
            if not asked:
                print(
                    f"| {turn + 1} | {usage['prompt_tokens']} | computed by the decode rank | | |"
                )
                known = usage["total_tokens"]
                continue
            new = usage["prompt_tokens"] - known
            wasted = max(0, moved - new - (turn > 0))  # one: an answer's last token has no KV yet
            print(f"| {turn + 1} | {usage['prompt_tokens']} | {new} | {moved} | {wasted} |")
            known = usage["total_tokens"]
            total, again = total + moved, again + wasted
    print(f"\n{again} of {total} tokens crossed again because text was tokenised anew")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
