"""Every case of tests/data/cases has a test that names it."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
LINE = re.compile(r"^\| (C\d\d) \|.*\| (.*) \|$", re.MULTILINE)
# in a docstring "C25", in a name "test_c25_..."
NAMED = re.compile(r"(?<![A-Za-z0-9])[cC](\d\d)(?![A-Za-z0-9])")


def test_every_case_is_named_by_a_test_or_says_why_it_does_not_apply():
    cases = LINE.findall((TESTS / "data/cases/README.md").read_text(encoding="utf-8"))
    assert len(cases) == len(dict(cases)) == 33
    paths = [path for path in sorted(TESTS.rglob("test_*.py")) if path != Path(__file__)]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    named = {f"C{number}" for number in NAMED.findall(text)}
    without = [case for case, holds in cases if case not in named and "Does not apply: " not in holds]
    assert without == []
    assert named <= dict(cases).keys()
