"""`gc-sidecar install-agent DIR`: write the directory that vLLM loads the agent from.

An init container runs it into a volume that the engine's container mounts; what is written, and
how, is in `gc_sidecar.install`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gc_sidecar.install import Installation, InstallError, install_agent
from gc_sidecar_agent.cli import EXIT_FAILED, EXIT_OK
from gc_sidecar_agent.commands.options import add_switch

# vLLM's own general plugins, which a VLLM_PLUGINS that does not name them shuts out.
VLLM_OWN_PLUGINS = ("lora_filesystem_resolver", "lora_hf_hub_resolver")

DESCRIPTION = """\
Write the agent into DIR: the package, the dist-info through which vLLM finds it, and two small
programs, DIR/bin/with-agent and DIR/bin/gc-sidecar. Nothing is installed into vLLM's image: the
engine finds the agent because DIR comes first in its PYTHONPATH.

Safe to repeat while an engine runs: only files of ours that differ are written, each complete from
the moment it has its name. Files of ours that do not belong to what is asked for go: those of an
older version, and the endpoint plugin where --endpoint-plugin is not given. All else in DIR stays.
"""

EPILOG = """\
examples:
  gc-sidecar install-agent /opt/gc-agent
  gc-sidecar install-agent /opt/gc-agent --endpoint-plugin  # and our route on vLLM's own port
  GC_SIDECAR_RUN_DIR=/run/gc-sidecar /opt/gc-agent/bin/with-agent vllm serve MODEL

exit codes:
  0  DIR holds the agent
  1  DIR cannot be written
  2  wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `install-agent`."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("directory", metavar="DIR", type=Path, help="made if it is not there")
    add_switch(
        parser,
        "--endpoint-plugin",
        help="also our route on vLLM's own port (vLLM 0.28 and later, transport `plugin`)",
    )
    add_switch(parser, "--json", help="print what was done as JSON")


def run(args: argparse.Namespace) -> int:
    """Install, say what to do next, return the exit code."""
    try:
        done = install_agent(args.directory, args.endpoint_plugin)
    except InstallError as error:
        print(f"gc-sidecar: install-agent: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(_as_json(done) if args.json else _next_steps(done))
    return EXIT_OK


def _environment(done: Installation) -> dict[str, str]:
    """What the engine's container has to have set."""
    environment = {
        "PYTHONPATH": str(done.directory),
        "GC_SIDECAR_RUN_DIR": "/run/gc-sidecar",
    }
    if done.endpoint_plugin:
        environment["VLLM_PLUGINS"] = ",".join(("gc_sidecar", *VLLM_OWN_PLUGINS))
    return environment


def _as_json(done: Installation) -> str:
    document = {
        "directory": str(done.directory),
        "version": done.version,
        "endpoint_plugin": done.endpoint_plugin,
        "endpoint_plugin_removed": done.endpoint_plugin_removed,
        "written": done.written,
        "removed": done.removed,
        "environment": _environment(done),
    }
    return json.dumps(document, indent=2)


def _next_steps(done: Installation) -> str:
    changed = f"files written: {len(done.written)}, removed: {len(done.removed)}"
    unchanged = not done.written and not done.removed
    environment = _environment(done)
    lines = [
        f"agent {done.version} is in {done.directory} ({'unchanged' if unchanged else changed})",
        *(
            ["endpoint plugin removed: --endpoint-plugin keeps it"]
            if done.endpoint_plugin_removed
            else []
        ),
        "",
        "Start vLLM with it, beside what its image already has in PYTHONPATH:",
        "",
        f"  export GC_SIDECAR_RUN_DIR={environment['GC_SIDECAR_RUN_DIR']}"
        "   # a directory that vLLM and the sidecar share",
        *(
            f"  export {name}={environment[name]}"
            for name in ("VLLM_PLUGINS",)
            if name in environment
        ),
        f"  {done.directory}/bin/with-agent vllm serve MODEL ...",
        "",
        f"or set PYTHONPATH={done.directory} yourself, if nothing else needs it.",
    ]
    if done.endpoint_plugin:
        lines += [
            "VLLM_PLUGINS is needed for our route, and shuts out every plugin that it does not",
            "name: add your own to it.",
        ]
    else:
        lines += [
            "If VLLM_PLUGINS is set, it must name gc_sidecar; if not, leave it so. Without",
            "--endpoint-plugin the sidecar reaches the engine through the run directory, or",
            "through vLLM's dev mode.",
        ]
    return "\n".join(lines)
