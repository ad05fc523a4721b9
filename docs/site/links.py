"""Links and lists of the pages, which are written for GitHub, on the site.

What a page links to outside docs/, and is a page or a picture, comes along, and what that links to in turn. Of
anything else (a program, a folder) the site has the link's text alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent.parent
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")
_PLACE = re.compile(r'id="(hf_hyperdflash\.[\w.]+)"')
_REFERENCE = re.compile(r"\[<code>~?([\w.]+)</code>\]")  # in a docstring, as transformers has them
_COMES_ALONG = (".md", ".png", ".svg")
_README = "overview.md"  # as a README.md it would be a second index.md


def on_files(files: Any, config: Any) -> Any:
    """Add what is linked to outside docs/, and the changelog."""
    waiting = ["CHANGELOG.md", *(page.src_uri for page in files.documentation_pages())]
    while waiting:
        uri = waiting.pop()
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(_source(uri))))
        if uri.endswith(".md"):
            linked = {_uri(uri, match[3]) for part in _prose(_source(uri)) for match in _LINK.finditer(part)}
            waiting += [there for there in linked if _comes_along(there) and not files.get_file_from_path(there)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Each link as the site has it, or its text alone."""
    here = page.file.src_uri

    def mended(match: re.Match[str]) -> str:
        there = _uri(here, match[3])
        if files.get_file_from_path(there) is None and _source(there).exists():
            return match[2]
        return f"{match[1]}[{match[2]}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{match[4] or ''})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(mended, part) for part in parts[::2]]
    return "\n".join(_indented("".join(parts).split("\n")))


def _indented(lines: list[str]) -> Iterator[str]:
    """What belongs to an item of a numbered list four spaces in, where GitHub takes three, and items apart."""
    in_list, in_code, more = False, False, 0
    for line in lines:
        spaces = len(line) - len(line.lstrip())
        if line and not spaces and not in_code:
            is_item = bool(re.match(r"\d+\. ", line))
            yield from [""] * (in_list and is_item)
            in_list = is_item
        if not in_code:
            more = spaces // 3 if in_list else 0
        in_code ^= line.lstrip().startswith("```")
        yield " " * more + line if line else line


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """What docstrings refer to: a link if it is on the page, its name alone if not."""
    places = [(match.start(), match[1]) for match in _PLACE.finditer(html)]

    def mended(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        here = max((place for place in places if place[0] < match.start()), default=(0, ""))[1]
        named = [place for _, place in places if place.rpartition(".")[2] == name]
        # Of several the one nearest to where it is said: a method of the same class before a function.
        nearest = max(named, key=lambda place: len(posixpath.commonprefix([here, place])), default=None)
        return f'<a href="#{nearest}"><code>{name}</code></a>' if nearest else f"<code>{name}</code>"

    return _REFERENCE.sub(mended, html)


def _prose(page: Path) -> list[str]:
    return _FENCE.split(page.read_text(encoding="utf-8"))[::2]


def _source(uri: str) -> Path:
    """The file of a page: of docs/, or of the repository."""
    if uri == _README:
        return DOCS.parent / "README.md"
    return DOCS / uri if (DOCS / uri).exists() else DOCS.parent / uri


def _uri(page: str, link: str) -> str:
    """What a page's link leads to, as the site has it: paths of the repository, docs/ without its name."""
    path = (_source(page).parent / link).resolve()
    if path == _source(_README):
        return _README
    root = DOCS if path.is_relative_to(DOCS) else DOCS.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else link


def _comes_along(uri: str) -> bool:
    return uri.endswith(_COMES_ALONG) and _source(uri).is_file()
