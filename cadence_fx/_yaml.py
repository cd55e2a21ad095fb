"""YAML, read as data: numbers, strings, lists and tables, and nothing that a tag names is ever made or called."""

from __future__ import annotations

from typing import Any

from cadence_fx.errors import ContractError

MAX_CHARACTERS = 1 << 16  # its reader is slow: a few seconds for so many
# Configurations of models name the class of a table so; the table is read and the class is not.
_CLASS_TAGS = ("!new:", "!name:")


def yaml_data(text: str) -> Any:
    """The data of a YAML text.

    Raises:
        ValueError: it is malformed or long, or has an alias, another tag or a key that is given twice.
        ContractError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ContractError("YAML is read by PyYAML: pip install pyyaml, or save the file as TOML or JSON") from error
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS:,} characters")

    class Loader(yaml.SafeLoader):  # a class of its own: constructors are registered on classes
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few of them can stand for gigabytes
                raise ValueError(f"line {self.peek_event().start_mark.line + 1}: aliases are not read")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if not isinstance(key, str):
                    raise ValueError(f"line {node.start_mark.line + 1}: expected text as a key, found {key!r}")
            if len(set(keys)) != len(keys):
                repeated = next(key for key in keys if keys.count(key) > 1)
                raise ValueError(f"line {node.start_mark.line + 1}: the key {repeated!r} is given twice")
            return super().construct_mapping(node, deep=deep)

    def plain(loader: Any, suffix: str, node: Any) -> Any:
        return loader.construct_mapping(node, deep=True)

    for tag in _CLASS_TAGS:
        Loader.add_multi_constructor(tag, plain)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
