"""Write the reference pages that follow from code: ``python -m docs.generate``.

``reference/configuration.md`` comes from core/config.py: keys, types and defaults from the classes'
source, meanings from their comments, rules from their checks. ``reference/metrics.md`` comes from
the tables in core/metrics.py and core/handoff_metrics.py. A style test fails when a page is not
what this script would write.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from core import config, metrics, presets
from core.handoff_metrics import HANDOFF_METRICS
from core.metrics import Kind, Metric

REFERENCE = Path(__file__).resolve().parent / "reference"
ROOT = config.ClusterConfig.__name__

_CONFIGURATION_HEAD = """\
# Configuration

<!-- Written by docs/generate.py from core/config.py. Change that file, then run
     `python -m docs.generate`. -->

A run is described by one frozen tree, [core/config.py](../../core/config.py). It is built from a
preset (or a YAML file) and overrides, checked, and not changed afterwards. An unknown key, a wrong
type or a broken rule ends the start with exit code 2 and one line that names the path.

```
antiphon serve                                    # the preset cpu
antiphon serve cpu-unified router.port=8001       # a preset and overrides
antiphon serve my-cluster.yaml decode.replicas=2  # a file and overrides
antiphon serve --model PATH_OR_NAME               # the same as model.source=PATH_OR_NAME
```

An override is `path=value`; the value is read as YAML. A file has the same form as the presets at
the end of this page. `antiphon presets` lists them.

Environment variables that are read ([core/env.py](../../core/env.py)): `ANTIPHON_CACHE`, else
`XDG_CACHE_HOME`, for the place of converted models; `ANTIPHON_KEY`, the key that commands show to
a router; and those that `router.api_keys` and `router.admin_key` name. Libraries read their own
(`HF_TOKEN`, Mooncake's `MC_*`); some `MC_*` get a default where the operator set none
([disagg/transport/mooncake_engine.py](../../disagg/transport/mooncake_engine.py)).
"""

_METRICS_HEAD = """\
# Metrics

<!-- Written by docs/generate.py from core/metrics.py and core/handoff_metrics.py. Change those
     files, then run `python -m docs.generate`. -->

The router shows every metric on `GET /metrics`, in the text format of Prometheus. The tables they
are declared in are [core/metrics.py](../../core/metrics.py) and, for handoffs,
[core/handoff_metrics.py](../../core/handoff_metrics.py); nothing else can be emitted. Metrics of
ranks are what each rank said of itself in its latest report to this router; a rank without a
session is not shown, and a restarted rank starts from zero.
"""

_METRICS_FOOT = """\
The label `status` of `antiphon_requests_total` is `ok`, `invalid`, `overloaded`, `unavailable`,
`error` or `aborted` ([router/meter.py](../../router/meter.py)). A request with several choices is
counted once. `rank` is `group/replica/rank`, for example `decode/0/0`.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a configuration class, as it is written there."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """One configuration class."""

    summary: str
    keys: tuple[Key, ...]
    rules: tuple[str, ...]


def pages() -> dict[Path, str]:
    """Every generated page: its path and its text."""
    return {
        REFERENCE / "configuration.md": configuration_page(),
        REFERENCE / "metrics.md": metrics_page(),
    }


# --- configuration ------------------------------------------------------------------------------


def configuration_page() -> str:
    """The page about every key of a ClusterConfig."""
    sections = read_sections(Path(config.__file__).read_text("utf-8"))
    root = sections[ROOT]
    parts = [_CONFIGURATION_HEAD]
    for name, keys in _by_section(root, sections).items():
        section = sections[name]
        parts.append(f"## {', '.join(keys)}\n\n{section.summary}\n")
        parts.append(_key_table(section.keys))
        parts.append(_rule_list(section.rules))
    parts.append(f"## The whole tree\n\n{root.summary}\n")
    parts.append(_rule_list(root.rules))
    parts.append("## Presets\n")
    parts += [f"`{name}`:\n\n```yaml\n{_preset(name)}\n```\n" for name in presets.names()]
    return "\n".join(part for part in parts if part)


def read_sections(source: str) -> dict[str, Section]:
    """Every class of a module, from its text."""
    comments = _comments(source)
    return {
        node.name: Section(
            summary=" ".join((ast.get_docstring(node) or "").replace("``", "`").split()),
            keys=tuple(_keys(node, comments)),
            rules=tuple(_rules(node)),
        )
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _by_section(root: Section, sections: dict[str, Section]) -> dict[str, list[str]]:
    """Class name -> the paths that hold one, in order: some classes serve several keys."""
    used: dict[str, list[str]] = {}

    def visit(section: Section, path: str) -> None:
        for key in section.keys:
            name = key.type.removesuffix(" | None")
            assert name in sections or section is not root, f"{key.name} is not a section"
            if name in sections:
                used.setdefault(name, []).append(path + key.name)
                visit(sections[name], f"{path}{key.name}.")

    visit(root, "")
    return used


def _comments(source: str) -> dict[int, str]:
    """Line number -> the comment on that line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _keys(node: ast.ClassDef, comments: dict[int, str]) -> Iterator[Key]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield Key(
                name=item.target.id,
                type=_type(item.annotation),
                default="" if item.value is None else ast.unparse(item.value).replace("'", '"'),
                meaning=comments.get(item.lineno, ""),
            )


def _type(annotation: ast.expr) -> str:
    """``Literal["a", "b"]`` as its values, every other type as it is written."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        values = annotation.slice
        words = values.elts if isinstance(values, ast.Tuple) else [values]
        return " or ".join(ast.unparse(word).replace("'", '"') for word in words)
    if isinstance(annotation, ast.BinOp) and "Literal" in ast.unparse(annotation.left):
        return f"{_type(annotation.left)} or {_type(annotation.right)}"
    return ast.unparse(annotation)


def _rules(node: ast.ClassDef) -> Iterator[str]:
    """What the checks of a class say when they fail."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_require":
            message = call.args[1]
            assert isinstance(message, ast.Constant | ast.JoinedStr), "a rule's message is a string"
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "N" for p in parts)


def _preset(name: str) -> str:
    file = resources.files("core") / "preset_files" / f"{name}.yaml"
    return file.read_text("utf-8").strip()


def _key_table(keys: Sequence[Key]) -> str:
    rows = [(f"`{k.name}`", _code(k.type), _code(k.default), _cell(k.meaning)) for k in keys]
    return _table(("key", "type", "default", "meaning"), rows)


# --- metrics ------------------------------------------------------------------------------------


def metrics_page() -> str:
    """The page about every line of both tables."""
    shown = (*metrics.METRICS, *HANDOFF_METRICS)
    of_ranks = [m for m in shown if "rank" in m.labels]
    of_router = [m for m in shown if "rank" not in m.labels]
    histograms = [m for m in shown if m.kind is Kind.HISTOGRAM]
    buckets = [(f"`{_shown(m)}`", ", ".join(f"{b:g}" for b in m.buckets)) for m in histograms]
    return "\n".join(
        (
            _METRICS_HEAD,
            f"## The router\n\n{_metric_table(of_router)}",
            f"## Each rank\n\n{_metric_table(of_ranks)}",
            f"## Buckets\n\n{_table(('histogram', 'upper bounds, in seconds'), buckets)}",
            f"## Labels\n\n{_METRICS_FOOT}",
        )
    )


def _metric_table(listed: Sequence[Metric]) -> str:
    rows = [
        (f"`{_shown(m)}`", m.kind.value, _code(", ".join(m.labels)), _cell(m.help)) for m in listed
    ]
    return _table(("name", "kind", "labels", "meaning"), rows)


def _shown(metric: Metric) -> str:
    """The name on the page that Prometheus scrapes."""
    suffix = "_total" if metric.kind is Kind.COUNTER else ""
    return f"{metrics.PREFIX}{metric.name}{suffix}"


# --- Markdown -----------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rule_list(lines: Sequence[str]) -> str:
    listed = "".join(f"* {line}\n" for line in lines)
    return f"Rules, in the words of their errors:\n\n{listed}" if lines else ""


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write every page."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
