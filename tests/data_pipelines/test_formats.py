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


@pytest.mark.parametrize(("page", "text"), [
    ("<p>fin</p>200 euros", "fin\n\n200 euros"),
    ("<h2>Article 5</h2>Le locataire", "Article 5\n\nLe locataire"),
    ("<ul><li>un</li>deux</ul>", "un\ndeux"),
    ("a<br><br>b<br>c", "a\n\nb\nc"),
    ("<table><tr><td>Revenue</td><td>1,000</td></tr><tr><th>Loss</th>\n<td><p>2</p></td><td></td></tr><tr><td></td><td>3</td></tr></table>end",
     "Revenue | 1,000\nLoss | 2\n3\n\nend"),
    ("<form><p>Le bail</p><select><option>no</select><button>no</button><textarea>no</textarea></form>après", "Le bail\n\naprès"),
    ("<header><h1>Site</h1></header><article><header><h1>Loi</h1></header>Texte<footer>no</footer></article>", "Loi\n\nTexte"),
    ("<main><header>no</header><h1>Loi</h1></main>", "Loi"),
    ("<p>10<sup>1</sup> ou 10 <sup><a>2, 3</a></sup>, <b>5 %</b><sup>4</sup></p>", "10 [1] ou 10 [2, 3], 5 % [4]"),
    ("<p>1<sup>er</sup> : 3 m<sup>2</sup></p><p><sup>1</sup> Note</p>", "1er : 3 m2\n\n1 Note"),
])  # fmt: skip
def test_html_neither_fuses_nor_loses_text(page: str, text: str):
    assert normalise(document_text("html", page.encode())) == text


@pytest.mark.parametrize("charset", ["iso-8859-1", "latin1", "us-ascii", "windows-1252"])
def test_latin_1_is_read_as_browsers_do(charset: str):
    page = f'<meta charset="{charset}"><p>l’article : 5 €</p>'.encode("cp1252")
    assert normalise(document_text("html", page)) == "l’article : 5 €"


def test_pdf():
    pdf = a_pdf([["Article 1", "Le locataire doit indem-", "niser le bailleur."], ["Page two (end)"]])
    assert normalise(document_text("pdf", pdf)) == "Article 1\nLe locataire doit indemniser le bailleur.\n\nPage two (end)"


def test_a_pdf_without_text_says_so():
    with pytest.raises(FormatError, match="without text"):
        document_text("pdf", a_pdf([[]]))


def test_docx():
    assert normalise(document_text("docx", a_docx())) == "Article 1\nLe locataire doit payer.\nLoyer | 900 $\nFin."


def a_docx_of(body: str) -> bytes:
    """A Word document with this body, in WordprocessingML."""
    from docx import Document
    from docx.oxml import parse_xml

    document, sink = Document(), io.BytesIO()
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    compatibility = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    for element in reversed(list(parse_xml(f'<w:body xmlns:w="{space}" xmlns:mc="{compatibility}">{body}</w:body>'))):
        document.element.body.insert(0, element)
    document.save(sink)
    return sink.getvalue()


RESTART = '<w:vMerge w:val="restart"/>'


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def cell(text: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr><w:p>{run(text)}</w:p></w:tc>"


@pytest.mark.parametrize(("body", "text"), [
    (f"<w:tbl><w:tblPr/><w:tblGrid/><w:tr>{cell('Loyer')}{cell('900')}{cell('900')}</w:tr></w:tbl>", "Loyer | 900 | 900"),
    (f"<w:tbl><w:tblPr/><w:tblGrid/><w:tr>{cell('a', RESTART)}{cell('b')}</w:tr>"
     f"<w:tr>{cell('', '<w:vMerge/>')}{cell('c')}</w:tr></w:tbl>", "a | b\na | c"),
    (f"<w:p>{run('Le preneur ')}<w:ins w:id='1' w:author='x'>{run('ne ')}</w:ins>{run('doit ')}<w:del w:id='2' w:author='x'><w:r><w:delText>pas</w:delText></w:r>"
     f"{run('plus')}</w:del><w:moveFrom w:id='3' w:author='x'>{run('moved')}</w:moveFrom>{run('payer')}</w:p>", "Le preneur ne doit payer"),
    (f"<w:sdt><w:sdtPr/><w:sdtContent><w:p>{run('Article 1')}</w:p></w:sdtContent></w:sdt>"
     f"<w:p>{run('Loyer : ')}<w:sdt><w:sdtContent>{run('900 €')}</w:sdtContent></w:sdt></w:p>", "Article 1\nLoyer : 900 €"),
    (f"<w:tbl><w:tblPr/><w:tblGrid/><w:tr>{cell('Loyer')}<w:sdt><w:sdtContent>{cell('900')}</w:sdtContent></w:sdt></w:tr></w:tbl>", "Loyer | 900"),
    (f"<w:p><w:pPr><w:tabs><w:tab w:val='left' w:pos='1'/></w:tabs></w:pPr>{run('a')}<w:r><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r></w:p>", "a b\nc"),
    (f"<w:p><w:r><mc:AlternateContent><mc:Choice><w:p>{run('cadre')}</w:p></mc:Choice><mc:Fallback><w:p>{run('cadre')}</w:p></mc:Fallback>"
     f"</mc:AlternateContent></w:r>{run('texte')}</w:p>", "cadre\ntexte"),
], ids=["equal cells", "merged rows", "tracked changes", "content controls", "controls in a table", "tabs and breaks", "text box"])  # fmt: skip
def test_docx_keeps_all_that_stands_on_the_page(body: str, text: str):
    assert normalise(document_text("docx", a_docx_of(body))) == text


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
