from __future__ import annotations

import inspect
import re

import pytest

from drawbar import errors
from drawbar.decoder import DecoderOutput
from drawbar.errors import DrawbarError, GenerationError
from drawbar.stats import Stats

CLASSES: dict[str, type[DrawbarError]] = {
    name: member
    for name, member in vars(errors).items()
    if inspect.isclass(member) and issubclass(member, DrawbarError) and member.__module__ == errors.__name__
}


def documented_tree() -> dict[str, str]:
    """Name to the name of its base, as drawn in the module's docstring."""
    assert errors.__doc__ is not None
    bases: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            assert len(path) == depth + 1, line
            bases[match[2]] = path[-2] if depth else "Exception"
    return bases


def test_the_docstring_draws_the_classes() -> None:
    assert documented_tree() == {name: member.__bases__[0].__name__ for name, member in CLASSES.items()}
    assert all(len(member.__bases__) == 1 for member in CLASSES.values())


def test_exit_codes() -> None:
    assert {name: member.exit_code for name, member in CLASSES.items()} == {
        "DrawbarError": 1,
        "ConfigurationError": 2,
        "BudgetError": 2,
        "PromptError": 2,
        "CheckpointError": 2,
        "UnsupportedModelError": 2,
        "VocabularyError": 2,
        "ReadError": 1,
        "NumericalError": 1,
        "GenerationError": 1,
    }


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_is_explained(name: str) -> None:
    assert CLASSES[name].__doc__


def test_a_failed_generation_holds_what_was_produced() -> None:
    output = DecoderOutput((1, 2), None, 3, Stats(tokens=2))
    with pytest.raises(DrawbarError, match=r"^the disk failed$") as caught:
        raise GenerationError("the disk failed", output)
    assert isinstance(caught.value, GenerationError)
    assert caught.value.output is output
