"""YAML as people write it for policy: plain data only, no aliases, no tags, no key twice. The only place for PyYAML."""

from __future__ import annotations

from typing import Any

from protocol.errors import BadRequest, ConfigError
from protocol.extras import install_step


def load_yaml(text: str) -> Any:
    """Plain data. Raises BadRequest with the line, ConfigError without PyYAML."""
    try:
        import yaml
    except ModuleNotFoundError as err:
        raise ConfigError("reading YAML needs PyYAML", next_step=install_step("coordinator")) from err

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        """Aliases can make a small file huge, and a key that stands twice hides one of its values."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="aliases are not taken", problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
            if twice is not None:
                raise yaml.MarkedYAMLError(problem=f"key {twice!r} stands twice", problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Plain)
    except yaml.YAMLError as err:
        raise BadRequest(f"the policy is not YAML: {err}", next_step="correct the line it names") from err
    except (RecursionError, TypeError) as err:
        raise BadRequest("the policy nests too deep, or has keys that are no texts") from err
