"""Text out of HTML, PDF, Word and text files; damaged files say why."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.clean import normalise
from data_pipelines.formats import READERS, FormatError, document_text


def a_pdf(pages: list[list[str]]) -> bytes:
    """A PDF with these lines, one text object a page, in Helvetica."""
    bodies = [
        b"BT /F1 12 Tf 14 TL 72 720 Td " + b" ".join(b"(" + line.encode("cp1252").replace(b"(", rb"\(").replace(b")", rb"\)") + b") Tj T*" for line in lines) + b" ET"
        for lines in pages
    ]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(pages)))
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[" + kids + b"]/Count %d>>" % len(pages),
               b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"]  # fmt: skip
    for n, body in enumerate(bodies):
        objects.append(b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>" % (5 + 2 * n))
        objects.append(b"<</Length %d>>stream\n" % len(body) + body + b"\nendstream")
    content, offsets = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        offsets.append(len(content))
        content += b"%d 0 obj" % number + item + b"endobj\n"
    table = b"".join(b"%010d 00000 n \n" % o for o in offsets)
    return content + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(content))


def a_docx() -> bytes:
    from docx import Document

    document, sink = Document(), io.BytesIO()
    document.add_heading("Article 1", 1)
    document.add_paragraph("Le locataire doit payer.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Loyer", "900 $"
    document.add_paragraph("Fin.")
    document.save(sink)
    return sink.getvalue()


def test_html():
    page = """<html><head><title>no</title><style>p{}</style></head><body><nav>menu</nav><h1>Article 1</h1>
    <p>Le <b>locataire</b>
    doit <i>payer</i>&nbsp;: 900&nbsp;$.</p><ul><li>un</li><li>deux</li></ul><script>var x</script><p>Fin &lt;1&gt;</p><footer>©</footer></body></html>"""
    assert normalise(document_text("html", page.encode())) == "Article 1\n\nLe locataire doit payer : 900 $.\n\nun\ndeux\n\nFin <1>"


def test_html_in_another_encoding():
    page = '<html><head><meta charset="iso-8859-1"></head><body><p>délai</p></body></html>'.encode("latin-1")
    assert normalise(document_text("html", page)) == "délai"


def test_pdf():
    pdf = a_pdf([["Article 1", "Le locataire doit indem-", "niser le bailleur."], ["Page two (end)"]])
    assert normalise(document_text("pdf", pdf)) == "Article 1\nLe locataire doit indemniser le bailleur.\n\nPage two (end)"


def test_a_pdf_without_text_says_so():
    with pytest.raises(FormatError, match="without text"):
        document_text("pdf", a_pdf([[]]))


def test_docx():
    assert normalise(document_text("docx", a_docx())) == "Article 1\nLe locataire doit payer.\nLoyer | 900 $\nFin."


@pytest.mark.parametrize(("content", "text"), [
    ("délai €".encode(), "délai €"), ("délai €".encode("utf-8-sig"), "délai €"), ("délai".encode("utf-16"), "délai"), ("délai €".encode("cp1252"), "délai €"), (b"", ""),
])  # fmt: skip
def test_encodings_of_text_files(content: bytes, text: str):
    assert document_text("txt", content) == text


def test_binary_data_is_no_text():
    with pytest.raises(FormatError, match="binary"):
        document_text("txt", b"\x7fELF\0\0")


@settings(max_examples=25)
@given(st.sampled_from(sorted(READERS)), st.binary(max_size=200), st.integers(0, 5000))
def test_damaged_files_give_text_or_a_reason(kind: str, noise: bytes, cut: int):
    whole = {"pdf": a_pdf([["Text"]]), "docx": a_docx() if kind == "docx" else b""}.get(kind, b"<p>x</p>")
    for content in (noise, whole[:cut] + noise, whole[:cut] + noise + whole[cut + len(noise) :]):
        try:
            assert isinstance(document_text(kind, content), str)
        except FormatError as error:
            assert str(error)
