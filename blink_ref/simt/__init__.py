"""One source of device code, three targets: `cuda`, `cpu` and `python`.

Start with :mod:`.vocabulary`, the words device code is written in; :func:`launch` runs one function.
"""

from .device import DeviceFunction, device
from .grid import first_of_share, grid_arrive, grid_barrier, grid_wait, grid_warp, grid_warps, team_of
from .launch import Running, aligned, choose_target, launch, start
from .swap import swap

__all__ = [
    "DeviceFunction",
    "Running",
    "aligned",
    "choose_target",
    "device",
    "first_of_share",
    "grid_arrive",
    "grid_barrier",
    "grid_wait",
    "grid_warp",
    "grid_warps",
    "launch",
    "start",
    "swap",
    "team_of",
]
