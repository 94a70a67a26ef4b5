"""What ``kv_connector_extra_config`` may say."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from decodebench.errors import DecodeBenchError
from decodebench.pattern import Normal

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's options, checked.

    Attributes:
        fill_mean: Mean of the values that are written.
        fill_std: Their standard deviation; 0 writes ``fill_mean`` everywhere.
        fill_seed: Seed of the values, in ``[0, 2**64)``: equal seeds give equal bytes.
        startup_fill: Fill whole caches when they are registered, and only the rest per request:
            ring buffers, and attention blocks that the engine zeroes.
        on_preemption: ``"refill"``: a resumed request decodes on, the KV of its prompt and of its
            output is filled again. ``"recompute"``: the engine prefills them.

    Raises:
        DecodeBenchError: A value is out of range.
    """

    fill_mean: float = 0.015
    fill_std: float = 0.0
    fill_seed: int = 0
    startup_fill: bool = False
    on_preemption: str = "refill"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.on_preemption not in ("refill", "recompute"):
            raise DecodeBenchError(
                f"on_preemption must be 'refill' or 'recompute', got {self.on_preemption!r}"
            )
        self.pattern()

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "Options":
        """Read the options of a ``kv_connector_extra_config``.

        Raises:
            DecodeBenchError: There is an unknown option, or one of a wrong type or value.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        known = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())  # type: ignore[union-attr]
        values: dict[str, Any] = {}
        for name, value in config.items():
            if name not in kinds:
                raise DecodeBenchError(f"unknown option {name!r}, known are {known}")
            kind = kinds[name]
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise DecodeBenchError(f"option {name} cannot be {value!r}, known are {known}")
            values[name] = value
        return cls(**values)

    def pattern(self) -> Normal:
        """Return the pattern to fill with.

        Raises:
            PatternError: A parameter is out of range.
        """
        return Normal(self.fill_mean, self.fill_std, self.fill_seed)
