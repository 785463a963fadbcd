"""``python -m bench.machine``: the kind of this machine, as a name for a file of results."""

import os
import re

import cpuinfo


def kind() -> str:
    """The CPU's brand and the cores that this process may use, such as ``AMD-EPYC-2-cores``."""
    brand = cpuinfo.get_cpu_info().get("brand_raw", "unknown CPU")
    words = re.sub(r"\((R|TM)\)", "", brand, flags=re.IGNORECASE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "-".join([*re.findall(r"[\w.]+", words), str(cores), "cores"])


if __name__ == "__main__":
    print(kind())
