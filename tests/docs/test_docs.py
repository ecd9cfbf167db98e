"""What the README and the pages name exists: links, paths, commands, fields; sentences stay short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from millrace.core.config import RunConfig
from millrace.flows.commands import COMMANDS, command_of
from tests.house.words import found_in
from tests.support.doc_commands import anchor_of, section

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("README.md"))
LONG_SENTENCES = (
    "algorithms",
    "coming-from",
    "configuration",
    "performance",
    "security",
)  # formulas and tables
MADE = ("docs/configuration.md", "docs/performance.md")  # of the words of other files
SKIMMED = [page for page in PAGES if page not in [f"docs/{name}.md" for name in LONG_SENTENCES]]
LONGEST_SENTENCE = 30
FOLDERS = "benchmarks|connectors|core|deployments|docs|examples|flows|src|tasks|tests"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, "benchmarks/LOG.md", "benchmarks/README.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _text(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in _anchors(path.read_text(encoding="utf-8")), target


def test_every_page_that_the_code_names_is_there() -> None:
    """In messages and docstrings: the page, and the heading behind a #."""
    sources = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")]
    named = {
        found
        for path in [*sources, *ROOT.glob("*.*"), ROOT / "Makefile"]
        if path.suffix in (".py", ".toml", ".yaml", "") and path.is_file()
        for found in re.findall(r"\bdocs/([\w-]+)\.md(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 8
    for name, anchor in sorted(named):
        assert (ROOT / "docs" / f"{name}.md").exists(), name
        assert not anchor or anchor in _anchors(_text(f"docs/{name}.md")), (name, anchor)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)[`:]", _text(page)):
        assert (ROOT / path).exists(), path
    for path in re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w./-]*\w)", "\n".join(_code(_text(page)))):
        assert (ROOT / path).exists(), path


def test_every_line_of_the_tree_exists() -> None:
    paths = list(_tree_paths(_text("README.md")))
    assert 15 <= len(paths) <= 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_map_answers_where_each_part_is() -> None:
    lines = section(_text("docs/architecture.md"), "where-is-what").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert 60 <= len({question for question, _ in rows}) == len(rows)
    assert [path for _, path in rows if not (ROOT / path.strip("`")).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    commands = set(COMMANDS)
    named = {
        name for code in _code(_text(page)) for name in re.findall(r"(?:^|\s|`)millrace ([a-z]+)\b", code)
    }
    assert named <= commands


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_every_option_of_a_command_exists(page: str) -> None:
    for code in _code(_text(page)):
        for name, rest in re.findall(r"(?:^|\s|`)millrace ([a-z]+)\b([^#|;&`]*)", code):
            named = set(re.findall(r"(?<=\s)--[a-z-]+", re.sub(r"\"[^\"]*\"", "", rest)))
            known = {option for field in command_of(name).params for option in field.opts}
            assert named <= known | {"--help"}, (code, named - known)


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_every_module_that_a_command_starts_exists(page: str) -> None:
    for name in re.findall(r"python -m ((?:millrace|benchmarks|tests)[\w.]*)", _text(page)):
        path = name.replace("millrace.", "", 1).replace(".", "/")
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists(), name


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/configuration.md"])
def test_every_field_exists(page: str) -> None:
    sections = "|".join(RunConfig.model_fields)
    text = _text(page)
    if (
        page == "docs/coming-from.md"
    ):  # other projects have sections of these names: the last column is millrace's
        text = "\n".join(line.split("|")[-2] if line.startswith("|") else line for line in text.splitlines())
    named = set(re.findall(rf"`((?:{sections})\.[a-z0-9_.]*[a-z0-9_])(?:`|:|=)", text))
    named |= {
        field
        for code in _code(text)
        for field in re.findall(rf"(?:^|\s)((?:{sections})\.[a-z0-9_.]*[a-z0-9_])=", code)
    }
    unknown = [
        name
        for name in sorted(named)
        if not name.endswith((".py", ".json", ".md")) and not _is_field(RunConfig, name.split("."))
    ]
    assert not unknown


@pytest.mark.parametrize("page", SKIMMED)
def test_a_skimmed_page_has_short_sentences(page: str) -> None:
    long = [sentence for sentence in _sentences(_text(page)) if len(sentence.split()) > LONGEST_SENTENCE]
    assert not long


def test_the_pages_read_as_they_would_be_said() -> None:
    """By the constructions that tests/house counts in the code; of the last few, most mean a place."""
    texts = {
        page: re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), _text(page), flags=re.DOTALL)
        for page in [*PAGES, "examples/README.md"]
        if page not in MADE
    }
    words = sum(len(text.split()) for text in texts.values())
    found = [each for page, text in texts.items() for each in found_in(page, 1, text)]
    assert len(found) / words * 10_000 < 7, "\n".join(map(str, found))


@pytest.mark.parametrize("page", SKIMMED[1:])
def test_a_page_says_first_whom_it_is_for(page: str) -> None:
    assert _text(page).split("\n\n")[1].startswith("For ")


def test_examples_of_the_pages_import_only_what_users_should() -> None:
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", _text(page), re.DOTALL):
            for line in re.findall(r"^(?:from|import) millrace.*$", code, re.MULTILINE):
                assert line.startswith("from millrace import "), (page, line)


def test_the_glossary_fits_on_a_screen() -> None:
    words = [
        line.split("|")[1].strip()
        for line in section(_text("docs/architecture.md"), "words").splitlines()
        if line.startswith("| ")
    ][1:]
    assert words == sorted(words)
    assert len(words) <= 30


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _code(text: str) -> list[str]:
    """Blocks of shell and code within a line."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    without = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", without)


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    anchors = [anchor_of(heading) for heading in headings]
    assert len(anchors) == len(set(anchors)), "two headings have one anchor"
    return set(anchors)


def _tree_paths(text: str) -> Iterator[str]:
    """Paths of the tree, from its lines and their depth."""
    tree = text.split("```\nmillrace/\n")[1].split("```")[0]
    parents: list[str] = []
    for line in tree.splitlines():
        drawn, name = re.match(r"([│├└─ ]*)(\S+)", line).groups()  # type: ignore[union-attr]
        depth = len(drawn) // 4 - 1
        parents = [*parents[:depth], name.rstrip("/")]
        yield "/".join(parents)


def _is_field(model: type[BaseModel], path: list[str]) -> bool:
    """Whether a dotted path leads to a field, through lists, unions and mappings."""
    name, *rest = path
    if name not in model.model_fields:
        return False
    if not rest:
        return True
    annotation = model.model_fields[name].annotation
    inner = list(_models(annotation))
    if not inner:
        return "dict" in str(annotation) or "Mapping" in str(annotation)
    if rest[0].isdigit():
        rest = rest[1:]
    return not rest or any(_is_field(other, rest) for other in inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _sentences(text: str) -> Iterator[str]:
    """Sentences of prose; a cell of a table and an item of a list are read by themselves."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=[-|#]|\d\. )", text):
        for cell in block.split("|"):
            yield from re.split(r"(?<=[.!?])\**\s+(?=\S)", " ".join(cell.split()))
