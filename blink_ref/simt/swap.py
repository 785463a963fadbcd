"""``swap``: another device function in one's place, for as long as a ``with`` lasts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .device import DeviceFunction, references


@contextmanager
def swap(old: DeviceFunction, new: DeviceFunction) -> Iterator[None]:
    """Within the ``with``, whoever calls `old` gets `new`, on every target; afterwards all is as it was.

    `new` takes the parameters of `old`, and meets the lanes at the same barriers. To call `old` within `new`,
    keep it under another name first: ``kept = device(old.python)``.

    Functions that reach `old` are compiled anew, for this process alone. Not while a grid runs. Raises
    ValueError where `old` has no barrier and `new` has: its callers may have been checked on the
    understanding that there is none (see :mod:`.sites`).
    """
    if new.collective and not old.collective:
        raise ValueError(f"lanes meet in {new} and not in {old}, whose callers do not know of it")
    callers = [(fn, dict(vars(fn))) for fn in DeviceFunction.known if old in reached(fn)]
    for fn, _ in callers:
        _forget_compiled(fn)
        fn.kept_on_disk = False
    old.python = new.python
    try:
        yield
    finally:
        for fn, before in callers:
            _forget_compiled(fn)
            vars(fn).update(before)


def _forget_compiled(fn: DeviceFunction) -> None:
    for target in ("cpu", "cpu_callee", "cuda"):
        vars(fn).pop(target, None)
    if on_cuda := sys.modules.get(f"{__package__}.on_cuda"):
        on_cuda.kernel.cache_clear()


def reached(fn: DeviceFunction) -> set[DeviceFunction]:
    """A device function and all that it calls, directly or not."""
    reached, queue = set(), [fn]
    while queue:
        current = queue.pop()
        if current not in reached:
            reached.add(current)
            queue += [value for value in references(current.python).values() if isinstance(value, DeviceFunction)]
    return reached
