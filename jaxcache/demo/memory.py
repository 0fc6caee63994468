"""Whether a cache fits into memory: asked before any of it is allocated."""

import os

import jax

from jaxcache.demo.conversations import BadInput
from jaxcache.layouts import CacheLayout, CacheSize


def check_memory(
    layout: CacheLayout,
    size: CacheSize,
    mesh: jax.sharding.Mesh | None = None,
    available: int | None = None,
) -> None:
    """Refuses a cache larger than the memory that is free.

    Args:
        layout: The layout of the cache.
        size: Its size.
        mesh: Devices that it is split over.
        available: Bytes free for it. Default: what the devices say, or the system.

    Raises:
        BadInput: with the bytes that are wanted and those that are free.
    """
    wanted = size.total_bytes(layout)
    if available is None:
        available = available_bytes(mesh)
    if available is not None and wanted > available:
        pages, rows = ",".join(map(str, size.num_pages)) or "0", size.num_rows
        raise BadInput(
            f"the cache would take {wanted:,} bytes for {pages} pages and {rows} rows, "
            f"and {available:,} are free; give smaller --pages, --rows or --max-seqs"
        )


def available_bytes(mesh: jax.sharding.Mesh | None) -> int | None:
    """Bytes free on the devices of a mesh together; None if nobody says."""
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        # All CPU devices share the memory of the machine.
        return _available_on_host()
    free = 0
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        free += stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free


def _available_on_host() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
