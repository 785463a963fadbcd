"""How a bench says what its time is worth."""

from blink_ref.roofline.ceilings import Ceilings
from blink_ref.roofline.costs import Cost


def report(benchmark, cost: Cost, ceilings: Ceilings, repeats: int = 1, **more: object) -> None:
    """Put cost, ceilings and the fraction of them into ``extra_info``.

    `cost` is that of one piece of work, of which a round of the bench does `repeats`. The fraction is the
    least time that the ceilings allow, over the median time.
    """
    most = {f"most_{name}": value for name, value in ceilings._asdict().items()}
    benchmark.extra_info.update(bytes=cost[0], flops=cost[1], **most, **more)
    if benchmark.stats is None:  # --benchmark-disable
        return
    seconds = benchmark.stats["median"] / repeats
    benchmark.extra_info.update(seconds=seconds, fraction=ceilings.seconds(*cost) / seconds)
