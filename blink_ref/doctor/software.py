"""Python and packages, by what the installed blink-ref asks for. Imports none of them."""

import platform
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .finding import FAILURE, OK, WARNING, Finding

US = "blink-ref"


def python() -> Iterator[Finding]:
    """This interpreter's version."""
    version, wanted = platform.python_version(), asked()[0]
    if satisfies(version, wanted):
        yield Finding("Python", OK, version)
    else:
        yield Finding("Python", FAILURE, f"{version}, not {wanted}", "make demo PYTHON=python3.12")


def packages() -> Iterator[Finding]:
    """What every command needs."""
    lacking = lacks("")
    if lacking:
        yield Finding("packages", FAILURE, "; ".join(lacking), f"pip install --upgrade {US}")
    else:
        yield Finding("packages", OK, f"numba {metadata.version('numba')}, numpy {metadata.version('numpy')}")


def http() -> Iterator[Finding]:
    """What ``blink-ref serve`` needs."""
    lacking = lacks("serve")
    if lacking:
        yield Finding("HTTP", WARNING, f"serve lacks {'; '.join(lacking)}", f"pip install '{US}[serve]'")
    else:
        yield Finding(
            "HTTP", OK, f"starlette {metadata.version('starlette')}, uvicorn {metadata.version('uvicorn')}"
        )


def lacks(extra: str) -> list[str]:
    """Which of the packages of an extra ('' = the plain install) are missing or of another version."""
    lacking = []
    for wish in asked()[1].get(extra, []):
        name, wanted = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(.*)", wish.strip()).groups()  # type: ignore[union-attr]
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{name} is not installed")
            continue
        if not satisfies(have, wanted):
            lacking.append(f"{name} is {have}, not {wanted}")
    return lacking


def asked() -> tuple[str, dict[str, list[str]]]:
    """What blink-ref asks for: a range of Python versions, and for each extra ('' = the plain install) its wishes.

    From the installed package's metadata; in a checkout that is not installed, from its pyproject.toml.
    """
    try:
        wanted = metadata.metadata(US)["Requires-Python"]
        lines = metadata.requires(US) or []
    except metadata.PackageNotFoundError:
        file = Path(__file__).parents[2] / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        return project["requires-python"], {"": project["dependencies"], **project["optional-dependencies"]}
    wishes: dict[str, list[str]] = {}
    for line in lines:
        wish, _, marker = line.partition(";")
        extra = re.search(r"""extra == ['"](.*?)['"]""", marker)
        if extra or not marker:
            wishes.setdefault(extra.group(1) if extra else "", []).append(wish.strip())
    return wanted, wishes


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as '>=3.11,<3.15' or '==0.68.*' (of PEP 440, what is used here)."""
    have = _numbers(version)
    for clause in filter(None, (part.strip() for part in wanted.split(","))):
        relation, text = re.match(r"(==|>=|<=|<|>)\s*(.*)", clause).groups()  # type: ignore[union-attr]
        bound = _numbers(text)
        met = {
            "==": have[: len(bound)] == bound,
            ">=": have >= bound,
            "<=": have <= bound,
            "<": have < bound,
            ">": have > bound,
        }
        if not met[relation]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", re.match(r"[\d.]*", version).group()))  # type: ignore[union-attr]
