"""JSON Schemas as rows: each key by its path, its type, and its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNITS = {
    "unix_s": "seconds since 1970",
    "gib": "GiB",
    "nbytes": "bytes",
    "bytes_per_s": "bytes/s",
    "flop_per_s_per_gpu": "FLOP/s",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s",
    "per_s": "1/s",
    "frac_low": "a share",
    "frac_high": "a share",
    "frac": "a share",
    "s": "seconds",
    "j": "joule",
    "w": "watt",
    "usd": "in the currency of the price",
}
"""Unit by the suffix of a key."""


def schema_of(file: Path, root: str = "") -> dict[str, Any]:
    """Return a schema file, starting at the definition ``root`` if given."""
    value = json.loads(file.read_text(encoding="utf-8"))
    if not root:
        return value
    return {"$ref": f"#/$defs/{root}", "$defs": value["$defs"]}


def key_rows(schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return each key once, as ``parts[].time_s``; its type with its unit; its meaning."""
    rows: dict[str, tuple[str, str, str]] = {}
    for path, spec in _keys(schema, schema["$defs"], "", ()):
        rows.setdefault(
            path, (f"`{path}`", _type(path, spec, schema["$defs"]), spec["description"])
        )
    return [*rows.values()]


def _keys(
    spec: dict[str, Any], known: dict[str, Any], path: str, inside: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if name := spec.get("$ref", "").rpartition("/")[2]:
        if name in inside:
            return
        spec, inside = {**known[name], **spec}, (*inside, name)
    for key, child in spec.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        yield here, child
        yield from _keys(child, known, here, inside)
    for each in ("allOf", "anyOf", "oneOf"):
        for part in spec.get(each, ()):
            yield from _keys(part, known, path, inside)
    if isinstance(spec.get("items"), dict):
        yield from _keys(spec["items"], known, f"{path}[]", inside)
    if isinstance(child := spec.get("additionalProperties"), dict):
        yield from _keys(child, known, f"{path}.NAME", inside)


def _type(path: str, spec: dict[str, Any], known: dict[str, Any]) -> str:
    plain = " or ".join(dict.fromkeys(_types(spec, known))) or "any"
    key = path.replace(".NAME", "").replace("[]", "").rpartition(".")[2]
    unit = next((unit for end, unit in _UNITS.items() if f"_{key}".endswith(f"_{end}")), "")
    return f"{plain}, {unit}" if unit and not plain.startswith(("`", "object")) else plain


def _types(spec: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    if name := spec.get("$ref", "").rpartition("/")[2]:
        yield from _types(known[name], known)
    for part in (*spec.get("anyOf", ()), *spec.get("oneOf", ()), *spec.get("allOf", ())):
        yield from _types(part, known)
    if "const" in spec:
        yield f"`{json.dumps(spec['const'])}`"
    elif "enum" in spec:
        yield ", ".join(f"`{json.dumps(one)}`" for one in spec["enum"])
    elif "type" in spec:
        type_names = spec["type"]
        yield from type_names if isinstance(type_names, list) else (type_names,)
