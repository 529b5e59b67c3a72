"""The generated reference pages are what the code says now."""

from __future__ import annotations

import msgspec
import pytest

from core import metrics
from core.config import ClusterConfig
from docs import generate
from tests.support import source

PAGES = generate.pages()


@pytest.mark.parametrize("path", PAGES, ids=source.name)
def test_a_page_is_not_stale(path):
    assert path.read_text("utf-8") == PAGES[path], "run: python -m docs.generate"


def test_every_key_is_on_the_page():
    page = generate.configuration_page()
    for section in msgspec.structs.fields(ClusterConfig):
        kinds = getattr(section.type, "__args__", (section.type,))
        assert section.name in page
        for key in msgspec.structs.fields(kinds[0]):
            assert f"| `{key.name}` |" in page, f"{section.name}.{key.name}"


def test_every_metric_is_on_the_page():
    shown = metrics.PrometheusSink().render().decode()
    page = generate.metrics_page()
    declared = {f"{metrics.PREFIX}{metric.name}" for metric in metrics.METRICS}
    assert all(f"`{name}`" in page or f"`{name}_total`" in page for name in declared)
    helps = [line.split()[2] for line in shown.splitlines() if line.startswith("# HELP")]
    assert all(f"`{name}`" in page for name in helps if not name.endswith("_created"))


def test_comments_types_defaults_and_rules_are_read():
    sections = generate.read_sections(
        "class A:\n"
        '    """What it is."""\n'
        '    size: Literal["s", "m"] = "s"  # of the shirt\n'
        "    def __post_init__(self):\n"
        '        _require(True, "size must fit")\n'
    )
    key = generate.Key(name="size", type='"s" or "m"', default='"s"', meaning="of the shirt")
    assert sections["A"] == generate.Section("What it is.", (key,), ("size must fit",))
