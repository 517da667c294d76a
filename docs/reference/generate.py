"""Writes the reference pages beside this file from the signatures and the docstrings of the public names.

    python docs/reference/generate.py

Everything in a page comes from the code, so no page here is edited by hand. A test compares the committed pages with
what this script writes.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import fsdp2

FOLDER = Path(__file__).parent
_WIDTH = 100
_NOTE = "<!-- Written by docs/reference/generate.py. Change the docstrings, then run `make docs`. -->"
_PACKAGE = Path(fsdp2.__file__).parent
# From the top down, as docs/architecture.md lists the folders. "" has the files beside them.
_FOLDERS = (
    "core",
    "extras",
    "",
    "tensors",
    "optim",
    "checkpoint",
    "memory",
    "planner",
    "report",
    "fsdp1",
    "testing",
)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_SECTION_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
_MADE_BY_FSDP2 = (
    fsdp2.FSDPModule,
    fsdp2.checkpoint.FullParamStream,
    fsdp2.UnshardHandle,
    fsdp2.GradientReductionHandle,
)
# Bases whose methods are listed with those of the class: it is written in several files.
_PARTS = ("fsdp2.fsdp1.has_params.HasParams", "fsdp2.fsdp1.has_state_dicts.HasStateDicts")
# Private by its name, but part of torch's FSDPModule, which users call.
_LISTED_METHODS = {"_set_unshard_async_op", "__call__"}


class Page(NamedTuple):
    """One page: the module that users import, and the names of it that the page shows."""

    file: str
    title: str
    intro: str
    module: ModuleType
    names: tuple[str, ...]


def public_pages() -> list[Page]:
    """All pages in reading order: the top of the package, then its rooms."""
    names = tuple(name for name in fsdp2.__all__ if name not in fsdp2.optim.__all__ + fsdp2.planner.__all__)
    trace = fsdp2.report.trace
    return [
        Page("fsdp2.md", "fsdp2", "`import fsdp2`.", fsdp2, names),
        *(_room(getattr(fsdp2, name)) for name in ("optim", "checkpoint", "memory", "planner", "report")),
        Page("trace.md", "fsdp2.report.trace", "`fsdp2.report.trace.record(model)`.", trace, defined_in(trace)),
        *(_room(getattr(fsdp2, name)) for name in ("tensors", "testing", "fsdp1", "core")),
        Page(
            "comms.md",
            "fsdp2.core.comms",
            "The interfaces of a user's own communication; `fsdp2.core.comms` also has what rooms use.",
            fsdp2.core.comms,
            ("Comm", "AllGather", "ReduceScatter"),
        ),
    ]


def _room(module: ModuleType) -> Page:
    """The page of a room: ``fsdp2.optim`` is there after ``import fsdp2``."""
    file = f"{module.__name__.removeprefix('fsdp2.')}.md"
    others = {*fsdp2.__all__} - {*fsdp2.optim.__all__, *fsdp2.planner.__all__}
    own = (name for name in module.__all__ if name not in others)
    names = tuple(name for name in own if not _is_from_elsewhere(getattr(module, name)))
    return Page(file, module.__name__, _inline(inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]), module, names)


def _is_from_elsewhere(value: object) -> bool:
    """Whether ``value`` is torch's, a module, or data that is too long to show."""
    return isinstance(value, (dict, ModuleType)) or not getattr(value, "__module__", "fsdp2").startswith("fsdp2")


def defined_in(module: ModuleType) -> tuple[str, ...]:
    """Public names that ``module`` itself defines, in the order of its file."""
    return tuple(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def render_all() -> dict[str, str]:
    """The text of every page by its file name, the index included."""
    pages = public_pages()
    texts = {"README.md": _index(pages), "files.md": _files(), **{page.file: _page(page) for page in pages}}
    return {name: re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for name, text in texts.items()}


# One page


def _index(pages: Sequence[Page]) -> str:
    lines = [_NOTE, "", "# Reference", "", "Every public name, from the docstrings of the code."]
    for page in pages:
        lines += ["", f"## {page.title}", "", "| name | what it is |", "|---|---|"]
        for name in page.names:
            value = getattr(page.module, name)
            lines.append(
                f"| [`{name}`]({page.file}#{_anchor(_heading(page, name))}) | {_cell(_first_sentence(value))} |"
            )
    lines += ["", "## Files of the package", "", "[What each file does](files.md), for readers of the code."]
    return "\n".join(lines) + "\n"


def _files() -> str:
    """One line per file of the package, from the first paragraph of its docstring."""
    by_folder: dict[str, list[Path]] = {name: [] for name in _FOLDERS}
    for path in sorted(_PACKAGE.rglob("*.py")):
        inside = path.relative_to(_PACKAGE)
        by_folder.setdefault(inside.parts[0] if len(inside.parts) > 1 else "", []).append(inside)
    lines = [
        _NOTE,
        "",
        "# Files of the package",
        "",
        "[Architecture](../architecture.md) says in which order to read them.",
    ]
    for folder, paths in by_folder.items():
        rules = [path for path in paths if folder and path == Path(folder, "__init__.py")]
        lines += [
            "",
            f"## `{folder or 'fsdp2'}/`",
            "",
            *map(_file_doc, rules),
            "",
            "| file | what it does |",
            "|---|---|",
        ]
        lines += [f"| `{path.as_posix()}` | {_cell(_file_doc(path))} |" for path in paths if path not in rules]
    return "\n".join(lines) + "\n"


def _file_doc(path: Path) -> str:
    """The first paragraph of the docstring of the file at ``path`` in the package, on one line."""
    doc = ast.get_docstring(ast.parse((_PACKAGE / path).read_text())) or ""
    return _inline(doc.split("\n\n")[0].replace("\n", " "))


def _page(page: Page) -> str:
    lines = [_NOTE, "", f"# {page.title}", "", page.intro]
    for title, names in _kinds(page):
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *_entry(name, getattr(page.module, name), _heading(page, name))]
    return "\n".join(lines) + "\n"


def _kinds(page: Page) -> Iterator[tuple[str, list[str]]]:
    """The names of ``page`` by what they are; functions first."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Constants": []}
    for name in page.names:
        value = getattr(page.module, name)
        if inspect.isclass(value):
            kinds["Errors" if issubclass(value, Exception) else "Classes"].append(name)
        else:
            kinds["Functions" if callable(value) else "Constants"].append(name)
    return ((title, names) for title, names in kinds.items() if names)


def _heading(page: Page, name: str) -> str:
    """The heading of an entry. Anchors ignore case, so a class beside a function of its name says that it is one."""
    is_twice = inspect.isclass(getattr(page.module, name)) and name.lower() in page.names
    return f"`{name}` (class)" if is_twice and name != name.lower() else f"`{name}`"


def _entry(name: str, value: Any, heading: str) -> Iterator[str]:
    yield f"### {heading}"
    yield ""
    if not callable(value):
        yield f"`{value!r}`"
    elif inspect.isclass(value):
        yield from _class(name, value)
    else:
        yield from _function(name, value)


def _class(name: str, cls: type) -> Iterator[str]:
    parameters = _constructor(cls)
    if parameters:
        yield from _fenced(_signature(name, parameters, None))
    ours = [base for base in cls.__bases__ if base.__module__.startswith("fsdp2.")]
    bases = [base.__name__ for base in ours if not _is_part(base)]
    if bases:
        yield f"Base classes: {', '.join(f'`{base}`' for base in bases)}."
        yield ""
    yield from _prose(_doc(cls))
    if issubclass(cls, enum.Enum):
        yield ""
        yield f"Members: {', '.join(f'`{name}.{member.name}`' for member in cls)}."
    for member, value in _members(cls):
        yield ""
        yield f"#### `{name}.{member}`"
        yield ""
        if isinstance(value, property):
            yield "Property."
            yield ""
            yield from _prose(_doc(value))
        else:
            yield from _function(member, value)


def _function(name: str, function: Any) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    plain = inspect.unwrap(function)
    signature = inspect.signature(plain)
    is_context = inspect.isgeneratorfunction(plain) and function is not plain
    returns = None if is_context else signature.return_annotation
    yield from _fenced(_signature(("with " if is_context else "") + name, list(signature.parameters.values()), returns))
    yield from _prose(_doc(plain))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that ``cls``, or a base that is a part of it, defines with a docstring."""
    if issubclass(cls, Exception):
        return
    seen: set[str] = set()
    for owner in (base for base in cls.__mro__ if base is cls or _is_part(base)):
        for name, value in vars(owner).items():
            is_listed = name in _LISTED_METHODS or not name.startswith("_")
            value = getattr(value, "__func__", value)  # of static and class methods
            is_member = inspect.isfunction(value) or isinstance(value, property)
            if is_listed and is_member and name not in seen and _doc(value):
                seen.add(name)
                yield name, value


def _is_part(base: type) -> bool:
    is_private = base.__module__.startswith("fsdp2.") and base.__name__.startswith("_")
    return is_private or f"{base.__module__}.{base.__name__}" in _PARTS


# Signatures


def _constructor(cls: type) -> list[inspect.Parameter]:
    """What a call of ``cls`` takes; nothing for classes that users do not construct, or construct without arguments."""
    if issubclass(cls, (Exception, enum.Enum)) or cls in _MADE_BY_FSDP2:
        return []
    function = next((vars(cls)[name] for name in ("__new__", "__init__") if name in vars(cls)), None)
    function = getattr(function, "__func__", function)
    is_own = inspect.isfunction(function) and not getattr(cls, "_is_protocol", False)
    return list(inspect.signature(function).parameters.values())[1:] if is_own else []  # type: ignore[arg-type]


def _signature(name: str, parameters: list[inspect.Parameter], returns: Any) -> str:
    """``name(...)`` on one line, or one parameter per line where that is too long."""
    given = [each for each in parameters if each.name not in ("self", "cls")]
    shown = [_parameter(each) for each in given]
    first_keyword = next((i for i, each in enumerate(given) if each.kind is each.KEYWORD_ONLY), None)
    has_star = any(each.kind is each.VAR_POSITIONAL for each in given)
    if first_keyword is not None and not has_star:
        shown.insert(first_keyword, "*")
    end = "" if returns in (None, "Any", inspect.Signature.empty) else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){end}"


def _parameter(parameter: inspect.Parameter) -> str:
    text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))  # with its stars
    annotated = parameter.annotation not in (inspect.Parameter.empty, "Any")
    if annotated:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += (" = " if annotated else "=") + _default(parameter.default)
    return text


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|collections\.abc)\.", "", text)


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"{type(value).__name__}()"
    return value.__name__ if inspect.isfunction(value) else repr(value)


# Docstrings


def _doc(value: Any) -> str:
    """The docstring of ``value`` itself, not one that it inherits or that ``dataclass`` makes."""
    text = getattr(value, "__doc__", None) or ""
    own = vars(value).get("__doc__") if inspect.isclass(value) else text
    return inspect.cleandoc(text) if own else ""


def _first_sentence(value: Any) -> str:
    if not callable(value):
        return f"`{value!r}`"
    paragraph = _inline(_doc(value).split("\n\n")[0].replace("\n", " "))
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


def _prose(doc: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, lists, code, and the sections of arguments, results and errors."""
    lines = doc.splitlines()
    start = 0
    while start < len(lines):
        found = _SECTION.match(lines[start])
        stop = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
        if found:
            yield from ("", f"{_SECTION_TITLES[found[1]]}:", "")
            yield from _items(lines[start + 1 : stop], named=found[1] != "Returns")
            yield ""
        elif lines[start].endswith("::"):
            yield _inline(lines[start])[:-1]
            yield from _fenced(textwrap.dedent("\n".join(lines[start + 1 : stop])).strip(), before=True)
        else:
            yield from map(_inline, lines[start:stop])
        start = stop


def _items(lines: Sequence[str], *, named: bool) -> Iterator[str]:
    """The entries of a section. Without names they are paragraphs."""
    body = textwrap.dedent("\n".join(lines)).strip().splitlines()
    for line in body:
        name, colon, text = line.partition(": ")
        if named and not line.startswith(" ") and colon:
            yield f"- {', '.join(f'`{each}`' for each in name.split(', '))}: {_inline(text)}"
        else:
            yield f"  {_inline(line.strip())}" if named else _inline(line)


def _inline(text: str) -> str:
    """reStructuredText's code and roles as Markdown's code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _fenced(code: str, *, before: bool = False) -> Iterator[str]:
    if before:
        yield ""
    yield from ("```py", *code.splitlines(), "```", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def main() -> None:
    written = render_all()
    for path in FOLDER.glob("*.md"):
        if path.name not in written:
            path.unlink()
    for name, text in written.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
