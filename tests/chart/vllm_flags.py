"""Gives the presets' command lines to a real vLLM's own parsers.

Run by vLLM's Python, with `[{"engine": [...], "benchmark": [...]}]` on standard input. Exits with 2 at the
first flag that vLLM does not know.
"""

from __future__ import annotations

import json
import sys

from vllm.benchmarks.serve import add_cli_args
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    for preset in json.load(sys.stdin):
        model, *flags = preset["engine"]
        make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *flags])
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        command = preset["benchmark"]
        assert command[:3] == ["vllm", "bench", "serve"], command
        parser.parse_args(command[3:])


if __name__ == "__main__":
    main()
