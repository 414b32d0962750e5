"""The public names of the package: signatures and docstrings."""

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
from forerun.calib.workload.argument_values import option_of
from forerun.calib.workload.config import Batch
from forerun.calib.workload.config_json import Encoded
from forerun.calib.workload.model_shape import ModelShape
from forerun.calib.workload.parallelism import Parallelism
from forerun.hooks.session.attaching import AttachedRun

_CLASSES = (AttachedRun, ModelShape, Parallelism, Batch)
"""Classes that the public names return or consist of."""
_ERRORS = (errors.ConfigError, errors.RecordError, errors.CalibrationError)


def python_parts() -> Iterator[str]:
    """Yield a section for each name, then the classes that they return or consist of."""
    for name in sorted(public_names(), key=str.lower):
        yield _section(f"forerun.{name}", getattr(forerun, name))
    for documented in _CLASSES:
        yield _section(f"{documented.__module__}.{documented.__name__}", documented)
    lines = [f"- `{one.__name__}`: {_prose(one)}" for one in _ERRORS]
    yield "## Errors\n\nEach is a `forerun.ForerunError`.\n\n" + "\n".join(lines)


def public_names() -> list[str]:
    """Return the names of ``forerun``, without its version."""
    return [name for name in forerun.__all__ if not name.startswith("_")]


def _section(title: str, documented: Any) -> str:
    parts = [f"## {title}", _prose(documented)]
    if not inspect.isclass(documented):
        return "\n\n".join((parts[0], _signature(title, documented), parts[1]))
    if is_dataclass(documented) and (rows := [*_field_rows(documented)]):
        parts.append("| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
    inherited = {"to_json": Encoded.to_json} if issubclass(documented, Encoded) else {}
    for name, member in (vars(documented) | inherited).items():
        if not name.startswith("_") and _is_shown(member):
            parts.append(_member(documented, name, member))
    return "\n\n".join(part for part in parts if part)


def _is_shown(member: Any) -> bool:
    is_called = inspect.isfunction(member) or isinstance(member, classmethod)
    is_read = isinstance(member, (property, cached_property))
    return (is_called or is_read) and bool(_doc(member))


def _member(cls: type, name: str, member: Any) -> str:
    if isinstance(member, (property, cached_property)):
        return f"### {cls.__name__}.{name}\n\n{_prose(member)}"
    called = getattr(cls, name)
    return f"### {cls.__name__}.{name}()\n\n{_signature(name, called)}\n\n{_prose(member)}"


def _signature(title: str, documented: Any) -> str:
    given = inspect.signature(documented).parameters.values()
    words = [_written(one) for one in given]
    words = [word for word in words if word not in ("self", "cls")]
    marks = {index for index, one in enumerate(given) if one.kind is one.KEYWORD_ONLY}
    if marks and not any(one.kind is one.VAR_POSITIONAL for one in given):
        words.insert(len(words) - len(marks) - _num_keywords(documented), "*")
    body = "".join(f"    {word},\n" for word in words)
    text = f"{title}(\n{body})" if body else f"{title}()"
    return f"```py\n{text.replace(chr(34), chr(39))}\n```"


def _written(one: inspect.Parameter) -> str:
    """Return a parameter without the quotes of postponed annotations."""
    text = re.sub(r"PosixPath\('(.*?)'\)", r"'\1'", str(one))
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"^([*\w]+): '(.*?)'( = |$)", r"\1: \2\3", text)


def _num_keywords(documented: Any) -> int:
    return sum(
        one.kind is one.VAR_KEYWORD for one in inspect.signature(documented).parameters.values()
    )


def _field_rows(cls: type) -> Iterator[str]:
    docs = _field_docs(cls)
    for one in fields(cls):
        if one.name.startswith("_"):
            continue
        default = "" if repr(one.default).startswith("<dataclasses") else f"`{_shown(one.default)}`"
        kind = str(one.type).replace("|", "\\|")
        said = one.metadata.get("argument")
        option = f" Megatron's `{option_of(said.option or said.name)}`." if said else ""
        yield f"| `{one.name}` | `{kind}` | {default} | {docs.get(one.name, '')}{option} |"


def _shown(value: Any) -> str:
    return (
        str(value)
        if hasattr(value, "value")
        else re.sub(r"<function (\w+) at 0x\w+>", r"\1", repr(value))
    )


def _field_docs(cls: type) -> dict[str, str]:
    """Return the string literal after each field."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    body = made.body if isinstance(made, ast.ClassDef) else []
    docs_by_field: dict[str, str] = {}
    for line, after in pairwise(body):
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = getattr(after.value, "value", None)
            if isinstance(text, str) and isinstance(line.target, ast.Name):
                docs_by_field[line.target.id] = _plain(text).replace("\n", " ").replace("|", "\\|")
    return docs_by_field


def _doc(documented: Any) -> str:
    target = documented.func if isinstance(documented, cached_property) else documented
    return inspect.cleandoc(target.__doc__ or "")


def _prose(documented: Any) -> str:
    return _plain(_doc(documented).partition(">>>")[0]).strip()


def _plain(text: str) -> str:
    return inspect.cleandoc(text).replace("``", "`")
