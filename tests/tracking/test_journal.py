import json
import math

import pytest

from raytune70b.storage import Folder
from raytune70b.tracking import journal
from raytune70b.tracking.journal import JOURNAL, JournalWriter, in_order, lineage, next_launch, parse_journal, read_journal, to_line
from tests.tracking.run_of_records import Story, step_fields


def test_records_come_back_as_written(tmp_path):
    run = Folder(tmp_path)
    story = Story().start(config={"a": [1, None, "é"]}).group(2, 0).steps(1, 3)
    writer = JournalWriter(run)
    for record in story.records:
        writer.append(record)
    assert read_journal(run) == story.records  # before close: a killed driver has lost nothing
    writer.close()
    assert read_journal(run) == story.records
    assert next_launch(story.records) == 2 and next_launch([]) == 1 and read_journal(Folder(tmp_path / "none")) == []


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_the_next_launch_appends_whole_lines(tmp_path, cut):
    run, records = Folder(tmp_path), Story().start().group(2, 0).steps(1, 4).records
    content = b"".join(map(to_line, records))
    run.write(JOURNAL, content[:-cut])
    assert read_journal(run) == records[:-1]
    writer = JournalWriter(run)
    assert writer.records == records[:-1]
    writer.append(records[-1])
    writer.close()
    assert run.read(JOURNAL) == content


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    records = Story().start().group(2, 0).steps(1, 4).records
    lines = [to_line(r) for r in records]
    lines[3] = lines[3][:20] + b"\x00" + lines[3][22:]
    read = parse_journal(b"".join(lines))
    assert read[3]["kind"] == "warning" and "line 4" in read[3]["text"]
    assert read[:3] + read[4:] == records[:3] + records[4:]


def test_values_without_a_json_form_keep_the_line_standard():
    line = to_line({"kind": "step", "loss": math.nan, "parts": (math.inf, {1: -math.inf}), "where": Folder("/x")})
    assert json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no standard JSON")) == {
        "kind": "step", "loss": None, "parts": [None, {"1": None}], "where": "Folder('/x')",
    }  # fmt: skip


def test_a_replayed_step_counts_once_and_what_was_taken_back_not_at_all():
    story = Story().start().group(4, 0).steps(1, 7).validation(7)
    story.group_end("killed").group(2, 5).steps(6, 6, seconds=9.0)
    kept = lineage(story.records, "step")
    assert [r["step"] for r in kept] == [1, 2, 3, 4, 5, 6]
    assert kept[-1]["seconds"] == 9.0 and kept[-2]["seconds"] == 1.0
    assert lineage(story.records, "validation") == []


def test_records_that_overtook_each_other_are_put_in_order():
    story = Story().start().group(4, 0).steps(1, 5).group_end("killed").group(2, 3).steps(4, 8)
    mixed = list(story.records)
    for a, b in ((4, 6), (10, 11), (9, 10)):  # step 1 after step 3; the ready of the second group behind its first steps
        mixed[a], mixed[b] = mixed[b], mixed[a]
    assert in_order(mixed) == story.records != mixed
    assert lineage(mixed, "step") == lineage(story.records, "step")


def test_a_full_disk_loses_no_record_and_leaves_no_half_line(tmp_path, monkeypatch):
    run, records = Folder(tmp_path), Story().start().group(2, 0).steps(1, 5).records
    writer = JournalWriter(run)
    writer.append(records[0])
    real, left = journal.os.write, [30]

    def write(file, data):
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        taken = data[: left[0]]
        left[0] -= len(taken)
        return real(file, taken)

    monkeypatch.setattr(journal.os, "write", write)
    writer.append(records[1])
    writer.append(records[2])
    assert "No space" in writer.error and read_journal(run) == records[:1] and run.read(JOURNAL).endswith(b"\n")
    monkeypatch.setattr(journal.os, "write", real)
    for record in records[3:]:
        writer.append(record)
    writer.close()
    assert writer.error is None and read_journal(run) == records


def test_an_object_store_gets_the_whole_file_and_a_refusing_one_does_not_stop_the_run(tmp_path, monkeypatch):
    run, records = Folder("memory://journal-test/run"), Story().start().group(2, 0).steps(1, 3).records
    monkeypatch.setattr(journal, "UPLOAD_EVERY_S", 0.05)
    assert run.local is None
    refusals = [3]
    real = Folder.write

    def write(self, name, content):
        if refusals[0]:
            refusals[0] -= 1
            raise OSError("the store refuses")
        real(self, name, content)

    monkeypatch.setattr(Folder, "write", write)
    writer = JournalWriter(run)
    for record in records:
        writer.append(record)
    writer.close(deadline_s=10)
    assert refusals == [0] and writer.error is None and read_journal(run) == records
    more = JournalWriter(run)  # the next launch goes on where this one ended
    more.append({"kind": "step", "time": 1.0, "launch": 2, **step_fields(4)})
    more.close(deadline_s=10)
    assert len(read_journal(run)) == len(records) + 1
