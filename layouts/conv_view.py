"""The combined view of a convolution state, for kernels that want one.

The cache keeps one buffer per section (x, B, C or q, k, v). From a gathered row
`[units, *unit_shape]` each section reshapes to `[num_channels, columns]`, and the
sections one below the other are the combined state `[num_channels, columns]`, columns
from the oldest input to the newest.
"""

import dataclasses
from collections.abc import Sequence

from jaxcache.layouts.roles import BufferSpec


@dataclasses.dataclass(frozen=True)
class ConvSection:
    """One role's channels in the combined state.

    Attributes:
        role: The role.
        start: First channel.
        units: Units of the section.
        unit_channels: Channels of one unit.
    """

    role: str
    start: int
    units: int
    unit_channels: int

    @property
    def num_channels(self) -> int:
        """Channels of the section."""
        return self.units * self.unit_channels

    @property
    def stop(self) -> int:
        """Channel after the last."""
        return self.start + self.num_channels


@dataclasses.dataclass(frozen=True)
class ConvView:
    """How the sections of one layer make the combined state.

    Attributes:
        sections: The sections in channel order; each starts where the last one stops.
        columns: Past inputs kept of each channel: the kernel's taps less one.
        dtype: Name of the element type.
    """

    sections: tuple[ConvSection, ...]
    columns: int
    dtype: str

    @property
    def num_channels(self) -> int:
        """Channels of all sections."""
        return self.sections[-1].stop

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the combined state of one row."""
        return (self.num_channels, self.columns)


def conv_view(specs: Sequence[BufferSpec], units: Sequence[int]) -> ConvView:
    """Returns the view of sections that hold this many units each."""
    sections: list[ConvSection] = []
    start = 0
    for spec, num_units in zip(specs, units, strict=True):
        section = ConvSection(spec.role, start, num_units, spec.unit_shape[0])
        sections.append(section)
        start = section.stop
    return ConvView(tuple(sections), specs[0].unit_shape[-1], specs[0].dtype)
