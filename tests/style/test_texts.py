"""Nothing names one machine, and every link leads somewhere."""

from __future__ import annotations

import re

import pytest

from tests.support import source

# written in pieces, so that this file does not find itself
MACHINE = re.compile(
    "|".join(["/wor" + "k/", "/roo" + "t/", "/home/[a-z]+/", "--extra-index" + "-url"])
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def test_no_text_names_a_path_of_one_machine():
    found = [
        f"{source.name(path)}:{number}: {line.strip()}"
        for path in source.texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("page", source.documents(), ids=source.name)
def test_links_lead_somewhere(page):
    text = CODE.sub("", page.read_text("utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(linked.read_text("utf-8")), f"{target}: no such heading"


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives to headings."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_anchors_are_githubs():
    assert anchors("## Life of a request: `step(now)`\n") == {"life-of-a-request-stepnow"}
