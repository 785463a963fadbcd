"""The command ``blink-ref``. What a command needs is imported when it runs, so ``--help`` is quick."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from blink_ref import __version__, arguments
from blink_ref.errors import BlinkError

if TYPE_CHECKING:
    import numpy as np

FAILURE, BAD_USE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a failure, 2 for bad use, 128 + n for signal n."""
    argv = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BlinkError as error:
        return _fail(error, "--debug" in argv)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt should not follow the ^C
        return INTERRUPTED
    except BrokenPipeError:
        _drop_standard_output()  # its reader (`| head`) has what it wants
        return BROKEN_PIPE
    except OSError as error:  # for one, standard output on a full disk
        _drop_standard_output()
        return _fail(error, "--debug" in argv)


def _run(argv: list[str]) -> int:
    # Its options are its own, and argparse cannot pass on options that it does not know.
    if argv[:1] == ["compile"]:
        from blink_ref.engine import compile as report

        return report.main(argv[1:])
    args = _parser().parse_args(argv)
    return args.run(args)


def _fail(error: Exception, debug: bool) -> int:
    if debug:
        raise error
    print(f"blink-ref: error: {error}", file=sys.stderr)
    return FAILURE


def _drop_standard_output() -> None:
    # What is still in its buffer would fail once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(signum: int, frame: object) -> NoReturn:
    # As an exception, so that every context manager on the way ends what it has started.
    raise SystemExit(TERMINATED)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse prints the usage too."""
        print(f"blink-ref: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(BAD_USE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="blink-ref",
        description="LLM serving without the CPU: a persistent GPU kernel, a request ring, and a NIC process.",
        epilog='example: blink-ref generate --chat "Why is the sky blue?"',
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"blink-ref {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_serve(commands)
    _add_trace(commands)
    _add_model(commands)
    _add_layout(commands)
    _add_doctor(commands)
    _add_check(commands)
    _add_bench(commands)
    commands.add_parser("compile", help="compile the kernel for a GPU that need not be there, and judge it")
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=f"example: {example}", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _add_generate(commands: Any) -> None:
    parser = _add(
        commands,
        "generate",
        _generate,
        "answer one prompt, streaming, and say how fast",
        'blink-ref generate --chat --max-tokens 60 "Why is the sky blue?"',
    )
    parser.add_argument("prompt", help="the prompt; - reads it from standard input, byte for byte")
    _add_engine_options(parser)
    arguments.add_request(parser)
    parser.add_argument(
        "--watch", action="store_true", help="show ring, pages, batch and phases as it runs, if on a terminal"
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")


def _add_serve(commands: Any) -> None:
    parser = _add(
        commands,
        "serve",
        _serve,
        "offer the OpenAI API over HTTP",
        "blink-ref serve --model smollm2 --port 8000",
    )
    _add_engine_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=arguments.port, default=8000, help="port (default 8000); 0 picks a free one"
    )


def _add_trace(commands: Any) -> None:
    parser = _add(
        commands,
        "trace",
        _trace,
        "record what the scheduler does, for Perfetto and as a picture",
        'blink-ref trace --model tiny "Once upon a time" "It was a"',
    )
    parser.add_argument("prompt", nargs="*", help="prompts, all at once; without any, twelve that show much")
    parser.add_argument("--file", help="more prompts, one a line")
    _add_engine_options(parser)
    parser.add_argument("--max-tokens", type=arguments.at_least(1), help="most tokens of each answer (default 64)")
    parser.add_argument("--out", default="trace.json", help="file for Perfetto (default trace.json)")
    parser.add_argument("--picture", default="trace.svg", help="file for the picture (default trace.svg)")
    parser.add_argument(
        "--attach",
        nargs="?",
        const="",
        metavar="WINDOW",
        help="record an engine that runs: the one of this window, or, without it, the only one",
    )
    parser.add_argument("--seconds", type=arguments.seconds, default=5.0, help="how long to attach (default 5)")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (the default), tiny, a directory, or org/name on the hub"
    )
    parser.add_argument(
        "--target", choices=["auto", "cuda", "cpu", "python"], default="auto", help="where the kernel runs"
    )
    parser.add_argument(
        "--sms", type=arguments.at_least(0), default=0, help="blocks of the kernel (default 0: all)"
    )
    parser.add_argument(
        "--scheduler-block",
        action=argparse.BooleanOptionalAction,
        help="block 0 only schedules, while the others compute (default: on a GPU with many SMs)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="a request's tokens never depend on what is computed beside it; slower on a GPU: no tensor cores",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=["float32", "bfloat16"],
        help="how keys and values are stored; bfloat16 takes half the room, but rounds (default: engine's choice)",
    )


def _add_model(commands: Any) -> None:
    summary = "list models, fetch one, or say where it lies"
    parser = commands.add_parser(
        "model", help=summary, description=summary, epilog="example: blink-ref model pull smollm2"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", _model_list, "list the models that have a name here", "blink-ref model list")
    for name, run, summary in (
        ("pull", _model_pull, "fetch a model, if it is not here yet"),
        ("path", _model_path, "print the directory of a model that is here"),
    ):
        added = _add(actions, name, run, summary, f"blink-ref model {name} smollm2")
        added.add_argument("name", help="smollm2, tiny, or org/name on the hub")


def _add_layout(commands: Any) -> None:
    _add(commands, "layout", _layout, "print every field of the default window", "blink-ref layout")


def _add_doctor(commands: Any) -> None:
    _add(
        commands,
        "doctor",
        _doctor,
        "say what this machine can run, what it lacks and what mends it",
        "blink-ref doctor",
    )


def _add_check(commands: Any) -> None:
    parser = _add(
        commands,
        "check",
        _check,
        "run a small engine as Python and look for data races, deadlocks and reads of unwritten memory",
        "blink-ref check --seeds 3",
    )
    parser.add_argument("--seeds", type=arguments.at_least(1), default=1, help="interleavings to try (default 1)")
    parser.add_argument("--seed", type=arguments.at_least(0), default=0, help="the first one's seed (default 0)")


def _add_bench(commands: Any) -> None:
    summary = "measure this machine"
    parser = commands.add_parser(
        "bench", help=summary, description=summary, epilog="example: blink-ref bench kernels --model tiny"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    added = _add(
        actions,
        "kernels",
        _bench_kernels,
        "what each phase of a step costs in the engine that serves, and how near to the machine's roofs it comes",
        "blink-ref bench kernels --model tiny",
    )
    _add_engine_options(added)
    added.add_argument(
        "--requests",
        type=arguments.at_least(1),
        nargs="+",
        default=[1, 8, 24],
        help="how many generate at once (default 1 8 24)",
    )
    added.add_argument(
        "--prompt", type=arguments.at_least(1), default=512, help="tokens of a prompt (default 512)"
    )
    added.add_argument("--picture", default="roofline.svg", help="file for the picture (default roofline.svg)")


def _generate(args: argparse.Namespace) -> int:
    from blink_ref.nic import generate

    return generate.run(args)


def _doctor(args: argparse.Namespace) -> int:
    from blink_ref.doctor import report

    return report.run(args)


def _check(args: argparse.Namespace) -> int:
    from blink_ref.check import report

    return report.run(args)


def _bench_kernels(args: argparse.Namespace) -> int:
    from blink_ref.roofline import command

    return command.run(args)


def _serve(args: argparse.Namespace) -> int:
    try:
        from blink_ref.nic import server
    except ModuleNotFoundError as error:
        raise BlinkError(f"serve needs {error.name}; install it with `pip install 'blink-ref[serve]'`") from None
    return server.run(args)


def _trace(args: argparse.Namespace) -> int:
    from blink_ref.trace import command

    return command.run(args)


def _model_list(args: argparse.Namespace) -> int:
    from blink_ref.model.store import available

    models = available()
    if args.json:
        print(json.dumps([vars(model) for model in models]))
        return 0
    for model in models:
        where = "here" if model.present else f"blink-ref model pull {model.name}"
        print(f"{model.name:10} {model.bytes / 1e6:8.1f} MB  {model.licence:12} {model.source:28} {where}")
    return 0


def _model_pull(args: argparse.Namespace) -> int:
    from blink_ref.model.store import resolve

    return _say_path(args, str(resolve(args.name)))


def _model_path(args: argparse.Namespace) -> int:
    from blink_ref.model.store import available, resolve

    if any(model.name == args.name and not model.present for model in available()):
        raise BlinkError(f"{args.name} is not here yet; run `blink-ref model pull {args.name}`")
    return _say_path(args, str(resolve(args.name)))


def _say_path(args: argparse.Namespace, path: str) -> int:
    print(json.dumps({"name": args.name, "path": path}) if args.json else path)
    return 0


def _layout(args: argparse.Namespace) -> int:
    from blink_ref.ring.layout import VERSION, Layout

    layout = Layout()
    start = layout.nic_half.itemsize
    fields = [*_fields(layout.nic_half, "NIC"), *_fields(layout.gpu_half, "GPU", start)]
    if args.json:
        print(json.dumps({"version": VERSION, "size": layout.size, "gpu_half": start, "fields": fields}))
        return 0
    print(f"version {VERSION}, {layout.size} bytes; the NIC's half at 0, the GPU's at {start}")
    print(f"{'offset':>9} {'bytes':>9}  {'type':14} {'writer':6}  field")
    for field in fields:
        print("{offset:9} {bytes:9}  {type:14} {writer:6}  {field}".format(**field))
    return 0


def _fields(half: "np.dtype", writer: str, start: int = 0, prefix: str = "") -> Iterator[dict[str, Any]]:
    """A row for each field of a structured dtype; the fields of an array of records are its first record's."""
    for name, (dtype, offset, *_) in (half.fields or {}).items():
        by = "host" if name in ("header", "stop") else writer
        shape = "".join(f"[{n}]" for n in dtype.shape)
        kind = "record" if dtype.base.fields else f"{dtype.base.kind}{dtype.base.itemsize * 8}"
        yield {
            "field": prefix + name,
            "offset": start + offset,
            "bytes": dtype.itemsize,
            "type": kind + shape,
            "writer": by,
        }
        if dtype.base.fields:
            inner = f"{prefix}{name}[0]." if dtype.shape else f"{prefix}{name}."
            yield from _fields(dtype.base, by, start + offset, inner)
