"""Training data that every machine has: the source code of Python's standard library."""

from __future__ import annotations

import collections
import pathlib
import random
import re
import sysconfig


def text(package=None):
    """Returns the text of the modules that are in no package, or of those in one package."""
    library = pathlib.Path(sysconfig.get_path('stdlib'))
    files = (library / package).rglob('*.py') if package else library.glob('*.py')
    tests = {'test', 'tests'}
    files = [file for file in sorted(files) if tests.isdisjoint(file.relative_to(library).parts)]
    return '\n'.join(file.read_text(encoding='utf-8', errors='ignore') for file in files)


def lines(packages):
    """Returns lines that one package only has, each with the package's number, in random order."""
    found = collections.defaultdict(set)
    for number, package in enumerate(packages):
        for line in text(package).splitlines():
            found[line.strip()].add(number)
    own = [(line, *of) for line, of in found.items() if len(of) == 1 and len(line) >= 20]
    random.Random(0).shuffle(own)
    return own


def words(line):
    """Splits a line into words, digits and signs: getSize(2) is get size ( 2 )."""
    return [word.lower() for word in re.findall(r'[A-Z]?[a-z]+|[A-Z]+|\d|[^\sA-Za-z\d]', line)]
