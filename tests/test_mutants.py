"""Every mutant still fits the code and its tests; `python -m tests.mutants` runs them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.entries import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()
CONTRACTS = (*ROOT.glob("deltasync/testing/*.py"), *ROOT.glob("tests/**/*contract.py"))
"""What test classes inherit from."""
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.file.startswith("deltasync/")
    assert mutant.promise
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    applied = mutant.applied(text)
    assert ast.dump(ast.parse(applied)) != ast.dump(ast.parse(text)), "it changes no statement"
    assert mutant.tests
    for test in mutant.tests:
        path, *names = test.partition("[")[0].split("::")
        assert names, f"{test} names no function"
        assert names[0] in defined(ROOT / path), f"{path} has no {names[0]}"
        for name in names[1:]:  # of a class, which may inherit it
            places = map(methods, (ROOT / path, *CONTRACTS))
            assert name in set().union(*places), f"{test} is not defined"


@cache
def defined(path: Path) -> set[str]:
    """Names of functions and classes of a file."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, NAMED)}


@cache
def methods(path: Path) -> set[str]:
    """Names of the functions of all its classes."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, NAMED)}
