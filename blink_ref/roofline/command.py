"""``blink-ref bench kernels``: a table of what each phase of a step costs, and the roofline as a picture."""

import argparse
import json
from pathlib import Path

from blink_ref.engine.settings import KV_BYTES, KV_DTYPE
from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.nic.engine_process import engine_process

from .ceilings import Ceilings, multiply_adds
from .measure import Figures, Phase, measure, works
from .picture import picture

HEAD = f"  {'phase':10} {'us':>10} {'MB':>9} {'Mflop':>9} {'flop/B':>7} {'GB/s':>8} {'Gflop/s':>9} {'of roof':>8}"


def run(args: argparse.Namespace) -> int:
    """The command. Raises BlinkError."""
    if not Path(args.picture).parent.is_dir():
        raise BlinkError(f"there is no folder {Path(args.picture).parent} for the picture; make it first")
    path = resolve(args.model)
    config = ModelConfig.load(path)
    with engine_process(
        path, args.target, args.sms, args.debug, args.scheduler_block, args.batch_invariant, args.kv_dtype
    ) as engine:
        ready = engine.ready
        on_gpu = ready.target == "cuda"
        most = Ceilings(ready.bandwidth, 0.0 if on_gpu else multiply_adds(ready.blocks))
        todo = works(config, ready.context, args.requests, args.prompt)
        kv_bytes = KV_BYTES[args.kv_dtype or KV_DTYPE[ready.target]]
        figures = [measure(engine.window, config, work, kv_bytes) for work in todo]
    title = f"{config.name} on {ready.target}, {ready.blocks} block{'s' * (ready.blocks > 1)}"
    Path(args.picture).write_text(picture(figures, most, title))
    if args.json:
        print(json.dumps(_as_dict(figures, most, title) | {"picture": args.picture}))
        return 0
    print(title)
    roofs = f"{most.bytes_per_s / 1e9:.1f} GB/s"
    if most.flops_per_s:
        roofs += f", multiply-adds {most.flops_per_s / 1e9:.0f} Gflop/s"
    print(f"measured here: memory {roofs}")
    for one in figures:
        rows = "1 row" if one.rows == 1 else f"{one.rows} rows"
        print(f"\n{one.work.name}: {rows} of {one.positions} positions, median of {one.steps} steps")
        print(HEAD)
        for phase in [*one.phases, one.step]:
            print(_line(phase, most))
    print(f"\n{args.picture}: the roofline; any browser shows it")
    return 0


def _line(phase: Phase, most: Ceilings) -> str:
    start = f"  {phase.name:10} {phase.seconds * 1e6:10.1f}"
    if not phase.bytes or not phase.seconds:
        return start
    size, flops = phase.bytes, phase.flops
    rest = f"{size / phase.seconds / 1e9:8.1f} {flops / phase.seconds / 1e9:9.1f} {phase.fraction(most):8.0%}"
    return f"{start} {size / 1e6:9.2f} {flops / 1e6:9.2f} {flops / size:7.2f} {rest}"


def _as_dict(figures: list[Figures], most: Ceilings, title: str) -> dict:
    def phase(one: Phase) -> dict:
        fraction = one.fraction(most) if one.bytes and one.seconds else None
        return one._asdict() | {"fraction_of_roof": fraction}

    return {
        "engine": title,
        "bytes_per_s": most.bytes_per_s,
        "flops_per_s": most.flops_per_s or None,
        "work": [
            {
                "name": one.work.name,
                "rows": one.rows,
                "positions": one.positions,
                "steps": one.steps,
                "phases": [phase(each) for each in one.phases],
                "step": phase(one.step),
            }
            for one in figures
        ],
    }
