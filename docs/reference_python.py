"""The public names of the package: signatures, and what each says of itself."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import forerun
from forerun.calib import errors
from forerun.calib.workload import Batch, Encoded, ModelShape, Parallelism
from forerun.hooks.session import AttachedRun

_CLASSES = (AttachedRun, ModelShape, Parallelism, Batch)
"""What the public names return or are made of."""
_ERRORS = (errors.ConfigError, errors.RecordError, errors.CalibrationError)


def python_parts() -> Iterator[str]:
    """A section for each name, then the classes that they return or are made of."""
    for name in sorted(public_names(), key=str.lower):
        yield _section(f"forerun.{name}", getattr(forerun, name))
    for held in _CLASSES:
        yield _section(f"{held.__module__}.{held.__name__}", held)
    lines = [f"- `{one.__name__}`: {_prose(one)}" for one in _ERRORS]
    yield "## Errors\n\nEach is a `forerun.ForerunError`.\n\n" + "\n".join(lines)


def public_names() -> list[str]:
    """Those of ``forerun``, but its version."""
    return [name for name in forerun.__all__ if not name.startswith("_")]


def _section(title: str, held: Any) -> str:
    parts = [f"## {title}", _prose(held)]
    if not inspect.isclass(held):
        return "\n\n".join((parts[0], _signature(title, held), parts[1]))
    if is_dataclass(held) and (rows := [*_field_rows(held)]):
        parts.append("| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
    inherited = {"to_json": Encoded.to_json} if issubclass(held, Encoded) else {}
    for name, member in (vars(held) | inherited).items():
        if not name.startswith("_") and _is_shown(member):
            parts.append(_member(held, name, member))
    return "\n\n".join(part for part in parts if part)


def _is_shown(member: Any) -> bool:
    is_called = inspect.isfunction(member) or isinstance(member, classmethod)
    is_read = isinstance(member, (property, cached_property))
    return (is_called or is_read) and bool(_doc(member))


def _member(held: type, name: str, member: Any) -> str:
    if isinstance(member, (property, cached_property)):
        return f"### {held.__name__}.{name}\n\n{_prose(member)}"
    called = getattr(held, name)
    return f"### {held.__name__}.{name}()\n\n{_signature(name, called)}\n\n{_prose(member)}"


def _signature(title: str, held: Any) -> str:
    given = inspect.signature(held).parameters.values()
    words = [_written(one) for one in given]
    words = [word for word in words if word not in ("self", "cls")]
    marks = {index for index, one in enumerate(given) if one.kind is one.KEYWORD_ONLY}
    if marks and not any(one.kind is one.VAR_POSITIONAL for one in given):
        words.insert(len(words) - len(marks) - _num_keywords(held), "*")
    body = "".join(f"    {word},\n" for word in words)
    text = f"{title}(\n{body})" if body else f"{title}()"
    return f"```py\n{text.replace(chr(34), chr(39))}\n```"


def _written(one: inspect.Parameter) -> str:
    """A parameter without the quotes that postponed annotations have."""
    text = re.sub(r"PosixPath\('(.*?)'\)", r"'\1'", str(one))
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"^([*\w]+): '(.*?)'( = |$)", r"\1: \2\3", text)


def _num_keywords(held: Any) -> int:
    return sum(one.kind is one.VAR_KEYWORD for one in inspect.signature(held).parameters.values())


def _field_rows(held: type) -> Iterator[str]:
    docs = _field_docs(held)
    for one in fields(held):
        if one.name.startswith("_"):
            continue
        default = "" if repr(one.default).startswith("<dataclasses") else f"`{_shown(one.default)}`"
        kind = str(one.type).replace("|", "\\|")
        yield f"| `{one.name}` | `{kind}` | {default} | {docs.get(one.name, '')} |"


def _shown(value: Any) -> str:
    return (
        str(value)
        if hasattr(value, "value")
        else re.sub(r"<function (\w+) at 0x\w+>", r"\1", repr(value))
    )


def _field_docs(held: type) -> dict[str, str]:
    """What stands as text behind each field."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(held))).body
    body = made.body if isinstance(made, ast.ClassDef) else []
    found: dict[str, str] = {}
    for line, after in pairwise(body):
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = getattr(after.value, "value", None)
            if isinstance(text, str) and isinstance(line.target, ast.Name):
                found[line.target.id] = _plain(text).replace("\n", " ").replace("|", "\\|")
    return found


def _doc(held: Any) -> str:
    target = held.func if isinstance(held, cached_property) else held
    return inspect.cleandoc(target.__doc__ or "")


def _prose(held: Any) -> str:
    return _plain(_doc(held).partition(">>>")[0]).strip()


def _plain(text: str) -> str:
    return inspect.cleandoc(text).replace("``", "`")
