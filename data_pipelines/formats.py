"""Text out of files that are one document each: plain text, HTML, PDF, Word.

Promises: what cannot be read raises `FormatError` with its reason, whatever the library raised. HTML keeps headings, paragraphs
and list items on lines of their own and leaves out scripts, navigation and forms; PDF pages are joined and words cut at
line ends made whole; Word paragraphs and table rows come in the order of the page.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable

from data_pipelines.clean import join_hyphenated

BLOCKS = {"p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "dd", "dt", "pre", "main"}
PARAGRAPHS = BLOCKS - {"br", "li", "tr", "dd", "dt", "div"}
LEFT_OUT = ["script", "style", "noscript", "template", "nav", "header", "footer", "aside", "form", "iframe", "svg", "button", "head"]

CHARSET = re.compile(rb"""(?i)charset\s*=\s*["']?([\w-]+)""")


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
    """The visible text of an HTML page."""
    from selectolax.lexbor import LexborHTMLParser

    named = CHARSET.search(content[:2000])
    text = content.decode(named[1].decode(), "replace") if named and _known(named[1].decode()) else text_of(content)
    tree = LexborHTMLParser(text)
    root = tree.body or tree.root
    if root is None:
        return ""
    for node in root.css(",".join(LEFT_OUT)):
        node.decompose()
    parts: list[str] = []
    for node in root.traverse(include_text=True):
        if node.tag == "-text":
            parts.append(_spaced(node.text_content or ""))
        elif node.tag in BLOCKS:
            parts.append("\n\n" if node.tag in PARAGRAPHS else "\n")
    return "".join(parts)


def _known(encoding: str) -> bool:
    try:
        return bool(codecs.lookup(encoding))
    except LookupError:
        return False


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


def docx_text(content: bytes) -> str:
    """Paragraphs and tables of a Word document, in the order of the page."""
    from docx import Document
    from docx.table import Table

    parts = []
    for item in Document(io.BytesIO(content)).iter_inner_content():
        if isinstance(item, Table):
            parts.append("\n".join(" | ".join(dict.fromkeys(cell.text for cell in row.cells)) for row in item.rows))
        else:
            heading = (item.style.name or "").startswith("Heading") if item.style is not None else False
            parts.append(f"\n{item.text}" if heading else item.text)
    return "\n".join(parts)


READERS: dict[str, Callable[[bytes], str]] = {"txt": text_of, "html": html_text, "pdf": pdf_text, "docx": docx_text}


def document_text(format: str, content: bytes) -> str:
    """The text of a file. Raises FormatError."""
    try:
        return READERS[format](content)
    except FormatError:
        raise
    except Exception as error:  # the libraries raise what their parsers meet; the file is bad, the run goes on
        raise FormatError(f"not readable as {format} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})") from error
