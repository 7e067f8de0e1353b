"""`gc-sidecar serve`: run the sidecar beside an engine.

Flags, then environment variables, then defaults; the server itself is `gc_sidecar.server`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE

DESCRIPTION = """\
Run the sidecar: a REST server that switches the GC policy in every process of a vLLM engine,
proves that it did, and exports metrics. It sees the engine by the pages in the run directory, and
reaches it by RPC over the engine's port (--engine-url) and by the board in the run directory.
"""

EPILOG = """\
examples:
  gc-sidecar serve --run-dir /run/gc-sidecar --engine-url http://localhost:8000
  gc-sidecar serve --run-dir /run/gc-sidecar --open-host 0.0.0.0 --open-port 9471  # board only
  gc-sidecar serve --engine-url http://gpu-7:8000 --engine-token-file /secret/endpoint-token
  curl -X POST localhost:9470/gc/freeze; curl 'localhost:9470/gc?format=table'

Every flag is also an environment variable: --run-dir is GC_SIDECAR_RUN_DIR, and a flag wins.
Lists are separated by commas there: GC_SIDECAR_ENGINE_URL=http://a:8000,http://b:8000

exit codes:
  0  stopped by SIGTERM or SIGINT (within 2 s; leases end by themselves)
  1  an address cannot be bound, or another sidecar has the run directory
  2  wrong usage, or a configuration that cannot be used
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`. None of them has a default here: the environment comes in between."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    engine = parser.add_argument_group("the engine")
    engine.add_argument(
        "--engine-url",
        action="append",
        metavar="URL",
        help="the engine's own address, http://localhost:8000; several (external load balancing) are"
        " one logical engine; none: the board alone",
    )
    engine.add_argument(
        "--run-dir",
        metavar="DIR",
        help="the directory that both containers share: pages, board and secret; for one engine alone",
    )
    engine.add_argument(
        "--engine-token-file",
        metavar="FILE",
        help="the secret of our endpoint plugin, for an engine without a shared run directory",
    )
    engine.add_argument(
        "--max-maintain-pause-s",
        metavar="SECONDS",
        help="refuse a maintenance that is expected to hold up a process for longer, for its health probe's"
        " sake; force=true overrides (default: no limit)",
    )
    control = parser.add_argument_group("the control listener: every route")
    control.add_argument(
        "--host",
        metavar="ADDRESS",
        help="default 127.0.0.1; anything beyond loopback needs --token-file",
    )
    control.add_argument("--port", metavar="PORT", help="default 9470; 0 takes a free one")
    control.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the bearer token that every request must carry; read again when it changes",
    )
    control.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a Host header to accept besides localhost, 127.0.0.1 and [::1]; may be repeated",
    )
    control.add_argument(
        "--read-only-page",
        action="store_true",
        default=None,
        help="the page at / has no buttons; the API takes changes all the same",
    )
    opened = parser.add_argument_group("the open listener: /healthz, /readyz and /metrics only")
    opened.add_argument(
        "--open-host", metavar="ADDRESS", help="default 127.0.0.1, if --open-port is given"
    )
    opened.add_argument(
        "--open-port", metavar="PORT", help="default off; 9471 if only --open-host is given"
    )
    logs = parser.add_argument_group("logs, on standard error")
    logs.add_argument("--log-level", metavar="LEVEL", help="debug, info (default), warning, error")
    logs.add_argument("--log-format", metavar="FORMAT", help="json (default) or text")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    # FastAPI and its kin take a second to import; `--help` should not.
    from gc_sidecar.server.app import make_services
    from gc_sidecar.server.claim import ClaimedError
    from gc_sidecar.server.listeners import ListenError, serve
    from gc_sidecar.server.logs import configure_logs
    from gc_sidecar.server.problems import KINDS
    from gc_sidecar.server.security import TokenFile
    from gc_sidecar.server.settings import Settings, SettingsError, load_settings

    try:
        settings = load_settings(
            {name: getattr(args, name, None) for name in Settings.model_fields}
        )
    except SettingsError as error:
        return _fail(str(error), EXIT_USAGE)
    if settings.token_file is not None:
        try:
            TokenFile(settings.token_file).load()
        except (OSError, ValueError) as error:
            reason = (
                os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            )
            return _fail(f"--token-file {settings.token_file}: {reason}", EXIT_USAGE)
    if settings.run_dir is None and not settings.engine_url:
        return _fail(
            "there is no engine to control: give --run-dir DIR (the directory that it shares with the"
            " engine), --engine-url URL, or both",
            EXIT_USAGE,
        )
    if settings.engine_token_file is not None:
        try:
            with open(settings.engine_token_file, "rb"):
                pass
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            return _fail(f"--engine-token-file {settings.engine_token_file}: {reason}", EXIT_USAGE)
    configure_logs(settings.log_level, settings.log_format)
    if settings.run_dir is not None and not os.path.isdir(settings.run_dir):
        fields = {"event": "run_dir_missing", "run_dir": settings.run_dir}
        logging.getLogger("gc_sidecar.server").warning(
            "the run directory is no directory (yet): no process is seen until it is there",
            extra={"fields": fields},
        )
    services = make_services(settings)
    # Our own medicine: what has been loaded stays for good, and no scrape needs to wait while it is walked.
    gc.collect()
    gc.freeze()
    try:
        serve(services)
    except ListenError as error:
        return _fail(str(error), EXIT_FAILED)
    except ClaimedError as error:
        return _fail(f"{error}; {KINDS['other_sidecar'].remedy}", EXIT_FAILED)
    return EXIT_OK


def _fail(message: str, code: int) -> int:
    print(f"gc-sidecar: serve: {message}", file=sys.stderr)
    return code
