"""The names that the package promises, and the example of its documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import drawbar


def test_public_names_are_sorted_and_all_there() -> None:
    assert drawbar.__all__ == sorted(drawbar.__all__) == dir(drawbar)
    assert {name: getattr(drawbar, name).__name__ for name in drawbar.__all__} == {n: n for n in drawbar.__all__}
    assert sorted(name for names in drawbar._HOMES.values() for name in names) == drawbar.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(drawbar, "Nonsense")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, drawbar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_of_the_documentation_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/extending.md", "exec"), {})
