"""The repository's documents and what cites them: names exist, and lists are complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

from rekindle.cli import COMMANDS
from rekindle_testing.paths import ROOT

DOCS = ROOT / "docs"
THIS = Path(__file__).resolve()

_CITATION = re.compile(r"\bdocs/[\w./-]*\w(?:#[\w-]+)?")
_URL = re.compile(r"\]\([^)\s]+\)|https?://\S+")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"\b(test_\w+)\.py::(test_\w+)")
_TEST_FILE = re.compile(r"`(?:[\w/]+/)?(test_\w+\.py)`")
_MODULE_FILE = re.compile(r"`([a-z_]+(?:/[a-z_]+)*\.py)`")
_MODULE = re.compile(r"`(?:python -m )?(rekindle(?:_operator)?(?:\.[a-z_0-9]+)+)")
_PAPER = re.compile(r"\(([A-Z]\w+ (?:et al\.|and [A-Z]\w+) \d{4})\)")
_MAKE = re.compile(r"(?:`|^)make ([a-z0-9]+)", re.MULTILINE)
_VARIABLE = re.compile(r"\bREKINDLE_[A-Z_]+\b")
_METRIC = re.compile(r"\brekindle_(?:task|coordinator|operator)_\w+")
_METRICS = (
    "pipelines/src/rekindle/task/metrics.py",
    "pipelines/src/rekindle/coordinator/shell/serving.py",
    "operator/src/rekindle_operator/metrics.py",
)
_CONSTANT = re.compile(r'^([A-Z_]+)(?:: \w+)? = "(\w+)"$', re.MULTILINE)
_RELEASE = re.compile(r"\b(etcd|Kubernetes|helm|kube-\w+)\b[^\n|]*\|? v?(\d+\.\d+\.\d+)")


@cache
def tracked() -> dict[Path, str]:
    """Every text file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    texts: dict[Path, str] = {}
    for name in listed.split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path == THIS:
            continue
        try:
            texts[path] = path.read_text()
        except UnicodeDecodeError:
            continue
    return texts


def documents() -> dict[Path, str]:
    return {path: text for path, text in tracked().items() if path.suffix == ".md"}


@cache
def anchors(document: Path) -> frozenset[str]:
    """As GitHub derives them from headings."""
    seen: Counter[str] = Counter()
    made: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", document.read_text())):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(made)


def dangles(path: Path, anchor: str) -> bool:
    return not path.exists() or (bool(anchor) and anchor not in anchors(path))


def cited(path: str) -> Path:
    """`docs/decisions/0030` stands for the record of that number."""
    if re.fullmatch(r"docs/decisions/\d{4}", path):
        return next((ROOT / "docs/decisions").glob(f"{path[-4:]}-*.md"), ROOT / path)
    return ROOT / path


def modules() -> frozenset[str]:
    """Dotted names of all modules of the distributions."""
    names = set()
    for path in tracked():
        if path.suffix == ".py" and "src" in path.relative_to(ROOT).parts:
            parts = path.with_suffix("").parts
            inside = parts[parts.index("src") + 1 :]
            names.add(".".join(inside[:-1] if inside[-1] == "__init__" else inside))
    return frozenset(names)


def where(path: Path, what: str) -> str:
    return f"{path.relative_to(ROOT)}: {what}"


def test_links_between_documents_are_valid() -> None:
    broken = []
    for document, text in documents().items():
        for link in _LINK.findall(_CODE.sub("", text)):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            path = Path(os.path.normpath(document.parent / target)) if target else document
            if dangles(path, anchor if path.suffix == ".md" else ""):
                broken.append(where(document, link))
    assert not broken, "\n".join(broken)


def test_citations_of_documents_are_valid() -> None:
    broken = []
    for path, text in tracked().items():
        for citation in _CITATION.findall(_URL.sub("", text)):
            target, _, anchor = citation.partition("#")
            if dangles(cited(target), anchor):
                broken.append(where(path, citation))
    assert not broken, "\n".join(broken)


def test_sections_are_cited_by_name() -> None:
    """Rules by page and anchor, papers as "Flux (Shah et al. 2004), section 3.3"."""
    left = [where(path, "§") for path, text in tracked().items() if "§" in text]
    assert not left, "\n".join(left)


def test_papers_that_are_cited_are_in_the_bibliography() -> None:
    known = (DOCS / "papers.md").read_text()
    missing = [
        where(path, paper)
        for path, text in tracked().items()
        for paper in _PAPER.findall(" ".join(text.split()))
        if paper not in known
    ]
    assert not missing, "\n".join(missing)


def test_tests_that_documents_name_exist() -> None:
    files = {path.name: text for path, text in tracked().items() if path.name.startswith("test_")}
    missing = []
    for document, text in documents().items():
        for file, name in _TEST.findall(text):
            if f"def {name}(" not in files.get(f"{file}.py", ""):
                missing.append(where(document, f"{file}.py::{name}"))
        missing += [where(document, f) for f in _TEST_FILE.findall(text) if f not in files]
    assert not missing, "\n".join(missing)


def test_every_invariant_that_is_built_names_a_test() -> None:
    text = (DOCS / "invariants.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [s.splitlines()[0] for s in sections] == [f"I{n}" for n in range(1, 10)]
    bare = [s.splitlines()[0] for s in sections if not _TEST.search(s) and "Not built" not in s]
    assert not bare


def test_modules_that_documents_name_exist() -> None:
    paths = [f"/{path.relative_to(ROOT)}" for path in tracked()]
    known = modules()
    missing = []
    for document, text in documents().items():
        if document.name == "CHANGELOG.md":
            continue
        for file in _MODULE_FILE.findall(text):
            if not any(path.endswith(f"/{file}") for path in paths):
                missing.append(where(document, file))
        for module in _MODULE.findall(text):
            parent = module.rpartition(".")[0]  # of a name inside a module
            if module not in known and parent not in known:
                missing.append(where(document, module))
    assert not missing, "\n".join(missing)


def test_targets_of_make_that_documents_name_exist() -> None:
    targets = re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing = [
        where(document, f"make {target}")
        for document, text in documents().items()
        for target in _MAKE.findall(text)
        if target not in targets and document.parent.name != "decisions"
    ]
    assert not missing, "\n".join(missing)


def test_variables_that_documents_name_are_read() -> None:
    code = {
        name
        for path, text in tracked().items()
        if path.suffix == ".py"
        for name in _VARIABLE.findall(text)
    }
    unknown = [
        where(document, name)
        for document, text in documents().items()
        for name in _VARIABLE.findall(text)
        if name not in code
    ]
    assert not unknown, "\n".join(unknown)


def test_every_command_is_documented() -> None:
    page = (DOCS / "command-line.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}" not in page] == []


def test_documented_metrics_are_those_that_are_exported() -> None:
    """Prometheus adds `_total` to the name of a counter."""
    exported = {
        name
        for path in _METRICS
        for name in re.findall(r'"(rekindle_\w+)"', tracked()[ROOT / path])
    }
    named = {
        document: {name.removesuffix("_total") for name in _METRIC.findall(text)}
        for document, text in documents().items()
    }
    assert named[DOCS / "operations.md"] == exported
    assert not [where(document, name) for document in named for name in named[document] - exported]


def test_documented_reasons_are_those_that_problems_have() -> None:
    sources = [
        text
        for path, text in tracked().items()
        if path.suffix == ".py" and "src" in path.parts and "Problem" in text
    ]
    constants = dict(_CONSTANT.findall("\n".join(sources)))
    given = {
        call.args[1]
        for text in sources
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Problem"
    }
    reasons = {
        reason.value if isinstance(reason, ast.Constant) else constants[ast.unparse(reason)]
        for reason in given
    }
    table = (DOCS / "topology.md").read_text().partition("\n## Reasons\n")[2]
    assert set(re.findall(r"`([A-Z]\w+)`", table)) == reasons


def test_every_document_is_in_an_index() -> None:
    decisions = (DOCS / "decisions" / "README.md").read_text()
    index = (DOCS / "README.md").read_text()
    missing = [
        path.name
        for path in documents()
        if path.parent == DOCS / "decisions" and f"({path.name})" not in decisions
        if path.name != "README.md"
    ]
    missing += [
        path.name
        for path in documents()
        if path.parent in (DOCS, DOCS / "design")
        and f"({path.relative_to(DOCS)})" not in index
        and path != DOCS / "README.md"
    ]
    assert not missing


def test_gaps_in_the_numbers_of_decisions_are_explained() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    used = {int(p.name[:4]) for p in (DOCS / "decisions").glob("[0-9]*.md")}
    explained: set[int] = set()
    for first, last in re.findall(r"\b(\d{4}) to (\d{4})\b", index):
        explained |= set(range(int(first), int(last) + 1))
    explained |= {int(n) for n in re.findall(r"(?<!\[)\b(\d{4})\b(?!-)", index)}
    assert set(range(1, max(used) + 1)) - used <= explained


def test_words_of_the_glossary_are_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert rows == sorted(rows, key=str.casefold)


def test_documents_repeat_no_version_of_the_embedded_cluster() -> None:
    """`go.mod` has them; a document that names one has the same."""
    built = (ROOT / "e2e/src/rekindle_testing/embedded/go/go.mod").read_text()
    other = [
        where(document, f"{name} {version}")
        for document, text in documents().items()
        for name, version in _RELEASE.findall(text)
        if f" v{version}\n" not in built
    ]
    assert not other, "\n".join(other)


def test_contributing_lists_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {".".join(m.split(".")[:2]) for m in modules() if m.count(".") >= 2}
    alone = {m for m in modules() if m.startswith("rekindle.") and m.count(".") == 1}
    assert not [p for p in sorted(packages | alone) if f"`{p}`" not in text]


def test_paths_that_contributing_names_exist() -> None:
    """Whole, or from any folder of the repository on."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    known = {"/" + str(path.relative_to(ROOT)) for path in tracked()}
    named = re.findall(r"`([\w.-]+(?:/[\w.-]*)+)`", text)
    missing = [
        n for n in named if not any(k.endswith(f"/{n}") or f"/{n.rstrip('/')}/" in k for k in known)
    ]
    assert not missing


def test_names_that_contributing_gives_are_in_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = "\n".join(t for path, t in tracked().items() if path.suffix != ".md")
    words = set(re.findall(r"\w+", code))
    named = re.findall(r"`([A-Za-z_][A-Za-z0-9_]+)(?:\([\w, ]*\))?`", text)
    assert [name for name in named if name not in words] == []


def test_papers_are_cited_with_authors_and_year() -> None:
    name = re.compile(r"\b(DPC|Flux|CEC|FlameStream|[Pp]rogressive recovery),? [Ss]ection")
    bare = [
        where(path, found)
        for path, text in tracked().items()
        if path.suffix == ".py"
        for found in name.findall(text)
    ]
    assert not bare
