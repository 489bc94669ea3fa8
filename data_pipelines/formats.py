"""Text out of files that are one document each: plain text, HTML, PDF, Word.

Promises: what cannot be read raises `FormatError` with its reason, whatever the library raised. HTML keeps headings, paragraphs,
list items and table rows on lines of their own, parts cells by ` | ` and leaves out scripts, navigation and the fields of
forms; PDF pages are joined and words cut at line ends made whole; Word paragraphs and table rows come in the order of the
page, with tracked changes accepted.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

from data_pipelines.clean import join_hyphenated

PARAGRAPHS = {"p", "ul", "ol", "dl", "table", "section", "article", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "main",
              "header", "footer", "form", "fieldset", "figure", "address", "hr"}  # fmt: skip
LINES = {"li", "tr", "dd", "dt", "div", "caption", "figcaption", "legend", "details", "summary"}
CELLS = {"td", "th"}
LEFT_OUT = {"script", "style", "noscript", "template", "nav", "aside", "iframe", "svg", "head",
            "button", "select", "option", "input", "textarea"}  # fmt: skip
GAPS = ("", " ", "\n", "\n\n", " | ")
"""What parts two texts; of all that stands between them, the last in this order."""
NOTE = re.compile(r"[-+\u2212\u2013]?\d")

CHARSET = re.compile(rb"""(?i)charset\s*=\s*["']?([\w-]+)""")
READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252"}
"""Encodings that browsers, and so the pages' authors, take for a wider one (WHATWG Encoding, 4.2)."""


class FormatError(ValueError):
    """A file that is not what its suffix says, or holds no text."""


def text_of(content: bytes) -> str:
    """A text file's characters: UTF-8, UTF-16 with its mark, else Windows-1252, which older French archives are in."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16")
    if b"\0" in content:
        raise FormatError("binary data, not text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252")


def html_text(content: bytes) -> str:
    """The visible text of an HTML page. A number set high after anything but a letter is a note: 10<sup>1</sup> gives `10 [1]`, not 101."""
    from selectolax.lexbor import LexborHTMLParser

    encoding = _declared_encoding(content)
    tree = LexborHTMLParser(content.decode(encoding, "replace") if encoding else text_of(content))
    parts: list[str] = []
    gap = ""
    stack = [(tree.body or tree.root, True)]
    while stack:
        node, entering = stack.pop()
        if node is None or _left_out(node):
            continue
        if node.tag == "-text":
            words = _spaced(node.text_content or "")
            if words.strip():
                parts += [gap, words]
                gap = ""
            else:
                gap = _wider(gap, words)
        elif entering and node.tag == "sup" and gap in ("", " ") and _is_note(node.text(), parts):
            parts.append(f" [{' '.join(node.text().split())}]")
            gap = ""
        else:
            gap = _gap_at(node, entering, gap)
            if entering:
                stack.append((node, False))
                stack += [(child, True) for child in reversed(list(node.iter(include_text=True)))]
    return "".join(parts)


def _declared_encoding(content: bytes) -> str | None:
    """The encoding that a page names, None where it names none that is known."""
    named = CHARSET.search(content[:2000])
    try:
        name = codecs.lookup(named[1].decode()).name if named else None
    except LookupError:
        return None
    return READ_AS.get(name, name) if name else None


def _left_out(node: Any) -> bool:
    """Whether a node is not the page's own text. A header or footer is kept only in an article or main, and with a heading in it."""
    if node.tag not in ("header", "footer"):
        return node.tag in LEFT_OUT
    above = node.parent
    while above is not None and above.tag not in ("article", "main"):
        above = above.parent
    return above is None or node.css_first("h1, h2, h3, h4, h5, h6") is None


def _gap_at(node: Any, entering: bool, gap: str) -> str:
    """The gap after the start or the end of an element."""
    if node.tag in CELLS:
        left = node.prev
        while left is not None and not (left.tag in CELLS and left.text().strip()):  # an empty first cell leaves the end of the row above
            left = left.prev
        return " | " if entering and left is not None else gap
    if node.tag == "br":
        return gap if not entering else "\n\n" if gap == "\n" else _wider(gap, "\n")
    if node.tag == "tr" and (not entering or gap == " | "):  # whatever its last cells hold, or the cell around its table
        return "\n"
    return _wider(gap, "\n\n" if node.tag in PARAGRAPHS else "\n" if node.tag in LINES else "")


def _wider(one: str, other: str) -> str:
    return max(one, other, key=GAPS.index)


def _is_note(text: str, before: list[str]) -> bool:
    """Whether a text that is set high would change the amount, or the word, that it follows."""
    last = "".join(before[-1:]).rstrip()[-1:]
    return bool(last) and not last.isalpha() and NOTE.match(text.strip()) is not None


def _spaced(text: str) -> str:
    """The words of a text node, with the blanks at its ends that part it from its neighbours."""
    words = " ".join(text.split())
    return f"{' ' if text[:1].isspace() else ''}{words}{' ' if words and text[-1:].isspace() else ''}"


def pdf_text(content: bytes) -> str:
    """The text of all pages of a PDF."""
    import pypdfium2

    document = pypdfium2.PdfDocument(content)
    try:
        pages = []
        for page in document:
            text_page = page.get_textpage()
            pages.append(text_page.get_text_bounded())
            text_page.close()
            page.close()
    finally:
        document.close()
    text = "\n\n".join(pages).replace("\r\n", "\n").replace("\ufffe", "-\n").replace("\x02", "-\n")
    if not text.strip():
        raise FormatError("a PDF without text, scanned perhaps")
    return join_hyphenated(text)


WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
PARAGRAPH, TABLE, TABLE_ROW, CELL, TEXT = (WORD + name for name in ("p", "tbl", "tr", "tc", "t"))
WRAPPERS = {WORD + name for name in ("sdt", "sdtContent", "customXml")}
"""Content controls and their kind: what they hold stands on the page like the rest."""
MARKS = {WORD + "tab": "\t", WORD + "br": "\n", WORD + "cr": "\n", WORD + "noBreakHyphen": "-"}
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
UNSEEN = {FALLBACK, *(WORD + name for name in ("pPr", "rPr", "sdtPr", "del", "moveFrom"))}
"""Properties, what a tracked change takes away, and the second copy of a text box for old programs."""


def docx_text(content: bytes) -> str:
    """Paragraphs and tables of a Word document, in the order of the page."""
    from docx import Document
    from docx.text.paragraph import Paragraph

    document = Document(io.BytesIO(content))
    parts = []
    for block in _below(document.element.body, PARAGRAPH, TABLE):
        style = Paragraph(block, document).style if block.tag == PARAGRAPH else None
        heading = style is not None and (style.name or "").startswith("Heading")
        parts.append(f"\n{_block_text(block)}" if heading else _block_text(block))
    return "\n".join(parts)


def _below(parent: Any, *tags: str) -> Iterator[Any]:
    """The children with these tags, also inside content controls."""
    for child in parent:
        if child.tag in tags:
            yield child
        elif child.tag in WRAPPERS:
            yield from _below(child, *tags)


def _block_text(block: Any) -> str:
    return _table_text(block) if block.tag == TABLE else _inline_text(block).strip("\n")


def _table_text(table: Any) -> str:
    """Lines of cells. A cell that spans columns is there once, one that spans rows in every row."""
    above: dict[int, str] = {}
    lines = []
    for row in _below(table, TABLE_ROW):
        column, cells = row.grid_before, []
        for cell in _below(row, CELL):
            if cell.vMerge != "continue":
                above[column] = "\n".join(_block_text(b) for b in _below(cell, PARAGRAPH, TABLE))
            cells.append(above.get(column, ""))
            column += cell.grid_span
        lines.append(" | ".join(cells) if any(cells) else "")
    return "\n".join(lines)


def _inline_text(node: Any) -> str:
    """The text of a paragraph or of a part of it; paragraphs in it, those of text boxes, are lines of their own."""
    if node.tag in UNSEEN:
        return ""
    if node.tag == TEXT:
        return node.text or ""
    inner = MARKS.get(node.tag, "") + "".join(_inline_text(child) for child in node)
    return f"\n{inner}\n" if node.tag == PARAGRAPH else inner


READERS: dict[str, Callable[[bytes], str]] = {"txt": text_of, "html": html_text, "pdf": pdf_text, "docx": docx_text}


def document_text(format: str, content: bytes) -> str:
    """The text of a file. Raises FormatError."""
    try:
        return READERS[format](content)
    except FormatError:
        raise
    except Exception as error:  # the libraries raise what their parsers meet; the file is bad, the run goes on
        raise FormatError(f"not readable as {format} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})") from error
