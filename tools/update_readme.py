"""Write the command line's own help into README.md, between the two marks.

PYTHONPATH=. python tools/update_readme.py            # rewrite
PYTHONPATH=. python tools/update_readme.py --check    # exit code 1 when README.md is out of date
"""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from glm_gpu import cli

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- reference: written by tools/update_readme.py -->\n", "<!-- end of reference -->\n"
# Each command as its words: "run", or "bench io" for one of a group; a group that does something alone comes before.
COMMANDS = [command.callback.__name__ for command in cli.app.registered_commands]
for group in cli.app.registered_groups:
    own = group.typer_instance.registered_callback
    COMMANDS += [group.name] if own is not None and own.invoke_without_command else []
    COMMANDS += [f"{group.name} {command.callback.__name__}" for command in group.typer_instance.registered_commands]


def reference() -> str:
    """The help of the program and of each command, as Markdown."""
    parts = [f"```\n{_help()}\n```\n"]
    parts += [f"### glm-gpu {command}\n\n```\n{_help(*command.split())}\n```\n" for command in COMMANDS]
    return "\n".join(parts)


def _help(*command: str) -> str:
    printed = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="100")
    with width, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return printed.getvalue().strip()


def updated(readme: str) -> str:
    """The text of README.md with the reference as it should be."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin and end, "README.md has lost its marks"
    return f"{head}{begin}\n{reference()}\n{end}{tail}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
