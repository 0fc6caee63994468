"""Reading the fields of a Hugging Face config: each fault names field and architecture.

Only the fields that are asked for are looked at, so whatever else a config holds
(`Infinity`, `{"__float__": "Infinity"}`, fields of the future) does no harm.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcache.layouts.arguments import MAX_SIZE
from jaxcache.layouts.roles import check_dtype

#: More than any model has; a larger number is a mistake that would take for ever.
MAX_LAYERS = 10_000

# Other versions of transformers have other names for a layer's type.
LAYER_TYPE_SPELLINGS = {
    "attention": "full_attention",
    "kda_attention": "linear_attention",
    "mamba": "linear_attention",
}


def load_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
) -> Mapping[str, Any]:
    """Returns the config as a mapping, read from its file or folder if it is a path.

    Raises:
        ValueError: if it is neither, or the file does not hold a JSON object.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise ValueError(
            f"config must be a mapping or a path, got {type(config).__name__}"
        )
    path = pathlib.Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config must be a JSON file, but {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"config must be a JSON object, but {path} holds a {type(values).__name__}"
        )
    return values


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of one config.

    Where a method takes several names, they are spellings of one field: the first that
    is there and not null counts.

    Attributes:
        architecture: The config's `model_type`, for messages.
        values: The config.
    """

    architecture: str
    values: Mapping[str, Any]

    def error(self, name: str, need: str, value: object) -> ValueError:
        """Returns the error for a field that is there but not as needed."""
        return ValueError(
            f"{name} of a {self.architecture} config {need}, got {value!r}"
        )

    def find(self, *names: str) -> tuple[str, Any]:
        """Returns the spelling and value of a field that must be there.

        Raises:
            ValueError: if it is missing.
        """
        there = [name for name in names if name in self.values]
        if not there:
            raise ValueError(
                f"{names[0]} is missing from the {self.architecture} config"
            )
        name = next((n for n in there if self.values[n] is not None), there[0])
        return name, self.values[name]

    def get(self, *names: str) -> Any:
        """Returns the value of a field, or `None` where it is missing."""
        values = (self.values.get(name) for name in names)
        return next((value for value in values if value is not None), None)

    def integer(self, *names: str, minimum: int = 1) -> int:
        """Returns a field that must be an integer, at least `minimum`."""
        name, value = self.find(*names)
        return self.as_integer(name, value, minimum)

    def num_layers(self) -> int:
        """Returns the number of layers."""
        name, value = self.find("num_hidden_layers")
        return self.as_integer(name, value, maximum=MAX_LAYERS)

    def as_integer(
        self, name: str, value: object, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """Returns `value`, found in field `name`, as an integer within the bounds."""
        number = (
            int(value) if isinstance(value, float) and value.is_integer() else value
        )
        if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
            raise self.error(name, f"must be an integer >= {minimum}", value)
        if number > maximum:
            raise self.error(name, f"must be at most {maximum}", value)
        return number

    def integers(self, name: str, value: object, below: int) -> tuple[int, ...]:
        """Returns `value`, found in field `name`, as integers from 0 to `below` - 1."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(name, "must be a list of layer indices", value)
        ids = tuple(self.as_integer(name, item, 0) for item in value)
        if any(i >= below for i in ids):
            raise self.error(name, f"must hold layer indices below {below}", list(ids))
        return ids

    def check_num_layers(self, name: str, count: int) -> None:
        """Checks how many layers field `name` lists."""
        if count > MAX_LAYERS:
            raise self.error(name, f"must have at most {MAX_LAYERS} layers", count)

    def divide(self, dividend: int, what: str, divisor: int, name: str) -> int:
        """Returns `dividend / divisor`, which must be a whole number.

        Args:
            dividend: The number to divide.
            what: The dividend in words.
            divisor: The number to divide it by.
            name: The field that the divisor comes from.
        """
        if dividend % divisor:
            raise self.error(name, f"must divide {what} = {dividend}", divisor)
        return dividend // divisor

    def layer_types(
        self, *names: str, known: Sequence[str], num_layers: int | None = None
    ) -> tuple[str, ...]:
        """Returns a list of layer types, each in its one spelling.

        Args:
            *names: Spellings of the field.
            known: The types that the architecture can have.
            num_layers: How many there must be; `None`: any number.
        """
        name, value = self.find(*names)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(name, "must be a list of layer types", value)
        self.check_num_layers(name, len(value))
        if num_layers is not None and len(value) != num_layers:
            raise self.error(
                name, f"must have num_hidden_layers = {num_layers} entries", len(value)
            )
        types = tuple(
            LAYER_TYPE_SPELLINGS.get(t, t) if isinstance(t, str) else t for t in value
        )
        for given, layer_type in zip(value, types, strict=True):
            if layer_type not in known:
                raise self.error(name, f"must hold {', '.join(known)}", given)
        return types

    def dtype(self, *names: str) -> str | None:
        """Returns a dtype, or `None` where the field is missing or null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            text = value.removeprefix("torch.") if isinstance(value, str) else value
            return check_dtype(f"{name} of a {self.architecture} config", text)
        return None
