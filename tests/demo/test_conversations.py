"""Conversations come from documentation, files and texts, or say why not."""

import json
import pathlib

import pytest

from jaxcache.demo.conversations import (
    EXCERPT_CHARACTERS,
    SIBLINGS,
    SYSTEM,
    BadInput,
    Conversation,
    from_documentation,
    from_jsonl,
    from_texts,
)


def test_documentation_gives_the_same_conversations_every_time() -> None:
    assert from_documentation() == from_documentation()


def test_siblings_share_system_prompt_and_document_and_then_part() -> None:
    first, second, third = from_documentation(["json"])
    assert first.system == second.system == third.system == SYSTEM
    openings = {talk.turns[0].partition("\n\nWhat does")[0] for talk in (first, second)}
    assert len(openings) == 1
    assert len(openings.pop()) > 300
    assert len({talk.turns[0] for talk in (first, second, third)}) == 3


def test_documentation_conversations_have_several_turns_and_unique_names() -> None:
    talks = from_documentation()
    assert len({talk.name for talk in talks}) == len(talks)
    assert all(len(talk.turns) >= 2 for talk in talks)


def write(tmp_path: pathlib.Path, *lines: str) -> pathlib.Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_json_lines_file_is_read_line_by_line(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path,
        json.dumps({"question_id": 81, "turns": ["one", "two"]}),
        "",
        json.dumps({"turns": ["three"], "system": "Be brief."}),
    )
    assert from_jsonl(path) == [
        Conversation("line 1", ("one", "two")),
        Conversation("line 3", ("three",), "Be brief."),
    ]


def test_only_newlines_end_a_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "talks.jsonl"
    line = json.dumps({"turns": ["one\u2028more"]}, ensure_ascii=False)
    path.write_text(line + "\r\n" + line, newline="", encoding="utf-8")
    assert [talk.turns for talk in from_jsonl(path)] == [("one\u2028more",)] * 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object, got list"),
        ('{"turn": ["a"]}', "line 2: has no key `turns`"),
        ('{"turns": []}', "line 2: `turns` must be a list with at least one text"),
        ('{"turns": "a"}', "line 2: `turns` must be a list with at least one text"),
        ('{"turns": ["a", 3]}', "line 2: turn 2 must be a non-empty text, got 3"),
        ('{"turns": [""]}', "line 2: turn 1 must be a non-empty text, got ''"),
        (r'{"turns": ["a", "b\ud800"]}', "turn 2 must be Unicode text, got the lone"),
        (r'{"turns": ["a"], "system": "\udc00"}', "`system` must be Unicode text"),
        (r'{"turns": ["a"], "n": ' + "1" * 5000 + "}", "line 2: not JSON"),
        ('{"turns": ["a"], "system": 1}', "line 2: `system` must be a text, got 1"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(
    tmp_path: pathlib.Path, line: str, complaint: str
) -> None:
    path = write(tmp_path, '{"turns": ["fine"]}', line)
    with pytest.raises(BadInput) as refusal:
        from_jsonl(path)
    assert complaint in str(refusal.value)


def test_files_without_use_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "missing.txt"
    for read in (from_jsonl, lambda path: from_texts([path])):
        with pytest.raises(BadInput, match=r"cannot read .*missing\.txt: No such file"):
            read(missing)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(BadInput, match="holds no conversations"):
        from_jsonl(empty)
    with pytest.raises(BadInput, match="holds no text"):
        from_texts([empty])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        from_texts([binary])


def test_a_text_becomes_siblings_that_ask_about_its_parts(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "story.txt"
    parts = [f"Part {i}: " + "word " * 60 for i in range(30)]
    path.write_text("\n\n".join(parts))
    talks = from_texts([path])
    assert [talk.name for talk in talks] == [f"{path}-{i + 1}" for i in range(SIBLINGS)]
    assert all(len(talk.turns) == 3 for talk in talks)
    assert all(parts[0].strip() in talk.turns[0] for talk in talks)
    assert all(len(talk.turns[0]) < EXCERPT_CHARACTERS + 400 for talk in talks)
    asked = [
        turn.rpartition("Explain this part: ")[2] for t in talks for turn in t.turns
    ]
    assert len(set(asked)) == len(asked)


def test_a_short_text_still_makes_a_conversation(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("One line.")
    (talk,) = from_texts([path])
    assert "One line." in talk.turns[0]


def test_a_text_given_twice_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    with pytest.raises(BadInput, match="given twice"):
        from_texts([path, path])
