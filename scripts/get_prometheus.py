"""Put `prometheus` and `promtool` into .venv/tools, for the tests that hold our rules against the real ones.

Tests import `find_prometheus`, which only looks; run as a program it fetches what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / ".venv" / "tools"
PROGRAMS = ("prometheus", "promtool")
DIRECTORY_VARIABLE = "GC_SIDECAR_PROMETHEUS_DIR"
APT_HELPER = Path("/usr/lib/apt/apt-helper")


@dataclass(frozen=True)
class Package:
    """A file of Debian's pool, as its signed index lists it. It runs on any glibc from 2.34 on."""

    path: str
    sha256: str


POOL = "pool/main/p/prometheus"
VERSION = "3.5.3+ds1-6"
PINNED = {
    "amd64": (
        Package(
            f"{POOL}/prometheus_{VERSION}_amd64.deb",
            "593bcced02d8082688ea034dfc543848ad145c5f793aae5aad756c4dbdfa98da",
        ),
        Package(
            f"{POOL}/promtool_{VERSION}_amd64.deb",
            "1fb8bad7b932e7a44bccb12517f0bd96d5d5d83f15d3a1c0e2aa705cbf93fe90",
        ),
    ),
    "arm64": (
        Package(
            f"{POOL}/prometheus_{VERSION}_arm64.deb",
            "1ee56de93c47df84ba1c1e3c88479db19455db5d99ee59f6bedc7b48f5d120a4",
        ),
        Package(
            f"{POOL}/promtool_{VERSION}_arm64.deb",
            "92945d09e49f4db89d7d701876be9b56ee21f0e702d9e710f4a61877546207c8",
        ),
    ),
}


class NotHad(Exception):
    """One way did not lead there; the message says why."""


def has_both(directory: Path) -> bool:
    """Whether `directory` holds both programs."""
    return all(os.access(directory / name, os.X_OK) for name in PROGRAMS)


def find_prometheus(environ: Mapping[str, str] = os.environ, tools: Path = TOOLS) -> Path | None:
    """The directory that holds both programs, or None: the one that the variable names and no other, else
    .venv/tools, else one on PATH. Asks no network."""
    named = environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).resolve() if has_both(Path(named)) else None
    on_path = [Path(entry) for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    return next((place for place in (tools, *on_path) if has_both(place)), None)


def output_of(command: list[str], directory: Path | None = None) -> str:
    """What `command` prints; NotHad when it fails or is not there."""
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotHad(f"{command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise NotHad(f"{Path(command[0]).name} {command[1]}: {' '.join(last) or 'failed'}")
    return result.stdout


def debian_mirrors() -> list[str]:
    """The archives that this machine's apt is set to, in its order and whatever the format of its files."""
    lists = output_of(["apt-get", "--print-uris", "update"])
    return list(dict.fromkeys(re.findall(r"^'(\S+?)/dists/", lists, re.MULTILINE)))


def fetch_pinned(scratch: Path) -> None:
    """The pinned 3.x from the pool, by apt's own downloader, which knows this machine's proxies."""
    architecture = output_of(["dpkg", "--print-architecture"]).strip()
    if architecture not in PINNED:
        raise NotHad(f"no package is pinned for {architecture}")
    mirrors = debian_mirrors()
    if not mirrors:
        raise NotHad("apt has no sources")
    for package in PINNED[architecture]:
        target = scratch / Path(package.path).name
        failures = []
        for mirror in mirrors:
            url, checksum = f"{mirror}/{package.path}", f"SHA256:{package.sha256}"
            try:
                output_of([str(APT_HELPER), "download-file", url, str(target), checksum])
                break
            except NotHad as failure:
                failures.append(str(failure))
        else:
            raise NotHad(f"{target.name} is on no mirror of apt's sources ({failures[0]})")


def fetch_own_release(scratch: Path) -> None:
    """What the machine's own release has, its signature checked by apt. Older releases have both programs in
    one package."""
    try:
        output_of(["apt-get", "download", *PROGRAMS], scratch)
    except NotHad:
        output_of(["apt-get", "download", PROGRAMS[0]], scratch)


def extract(scratch: Path, tools: Path) -> None:
    """Move both programs out of the packages in `scratch` into `tools`."""
    root = scratch / "root"
    packages = sorted(scratch.glob("*.deb"))
    for package in packages:
        output_of(["dpkg-deb", "--extract", str(package), str(root)])
    if not has_both(root / "usr" / "bin"):
        raise NotHad(f"{', '.join(p.name for p in packages)}: lacks one of {', '.join(PROGRAMS)}")
    for name in PROGRAMS:
        # Within one file system, so that nobody ever sees half a program.
        os.replace(root / "usr" / "bin" / name, tools / name)


def link_from_path(tools: Path) -> None:
    """Links to what PATH has."""
    found = {name: shutil.which(name) for name in PROGRAMS}
    for name, path in found.items():
        if path is None:
            raise NotHad(f"{name} is not on PATH")
    for name, path in found.items():
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(str(path))


def get_prometheus(tools: Path = TOOLS) -> list[str]:
    """Fill `tools` by the first way that works. Returns why the ones before it did not."""
    tools.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    ways = (
        (f"Prometheus {VERSION} of Debian", fetch_pinned),
        ("this machine's own release", fetch_own_release),
    )
    for name, fetch in ways:
        with tempfile.TemporaryDirectory(dir=tools) as scratch:
            try:
                fetch(Path(scratch))
                extract(Path(scratch), tools)
                return failures
            except NotHad as failure:
                failures.append(f"{name}: {failure}")
    try:
        link_from_path(tools)
    except NotHad as failure:
        sys.exit(
            "Prometheus could not be had:\n  "
            + "\n  ".join([*failures, f"PATH: {failure}"])
            + "\nInstall Prometheus 2.42 or later with its promtool (on Debian: apt-get install prometheus), or\n"
            f"set {DIRECTORY_VARIABLE} to a directory that holds both programs."
        )
    return failures


def main() -> None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named and not has_both(Path(named)):
        sys.exit(f"{DIRECTORY_VARIABLE}={named}: it does not hold both {' and '.join(PROGRAMS)}")
    if not named and not has_both(TOOLS):
        for failure in get_prometheus():
            print(f"    passed over {failure}", file=sys.stderr)
    directory = find_prometheus()
    assert directory is not None
    version = output_of([str(directory / "promtool"), "--version"]).splitlines()[0]
    print(f"==> {version.partition(' (')[0]} and prometheus are in {directory}")


if __name__ == "__main__":
    main()
