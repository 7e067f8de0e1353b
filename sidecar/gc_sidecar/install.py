"""The injected tree: a directory that, put on vLLM's PYTHONPATH, makes it load the agent.

It holds the package `gc_sidecar_agent`, the dist-info through which vLLM finds its entry points,
and two small programs. Nothing is installed into vLLM's image, and an engine may be reading the
directory while it is written: every file is complete from the moment it has its name.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import gc_sidecar_agent

PACKAGE = "gc_sidecar_agent"
ENDPOINT = "gc_sidecar_endpoint"
FILE_MODE, PROGRAM_MODE, DIRECTORY_MODE = 0o644, 0o755, 0o755

PLUGIN_ENTRY_POINTS = f"""\
[vllm.general_plugins]
gc_sidecar = {PACKAGE}.plugin:register
"""

ENDPOINT_ENTRY_POINTS = f"""\
[vllm.endpoint_plugins]
gc_sidecar = {PACKAGE}.endpoint:GcEndpointPlugin
"""

METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: {summary}
License: Apache-2.0
Requires-Python: >=3.10
"""

# Both programs find the directory that they lie in, also through symbolic links and from any
# working directory, with nothing but the shell and `readlink`: busybox has both.
FIND_DIRECTORY = """\
self=$0
while [ -h "$self" ]; do
    target=$(readlink "$self")
    case $target in
        /*) self=$target ;;
        *)
            case $self in
                */*) self=${self%/*}/$target ;;
                *) self=$target ;;
            esac ;;
    esac
done
case $self in
    */*) here=${self%/*} ;;
    *) here=. ;;
esac
directory=$(CDPATH= cd -P -- "${here:-/}/.." && pwd -P) || exit 1
"""

WITH_AGENT = f"""\
#!/bin/sh
# Run a command with the gc-sidecar agent on its PYTHONPATH, before what the image has there:
#   with-agent vllm serve MODEL
# A pod that sets PYTHONPATH instead would replace the image's own.
if [ $# -eq 0 ]; then
    echo "usage: with-agent COMMAND [ARGUMENT...]" >&2
    exit 2
fi
{FIND_DIRECTORY}
PYTHONPATH=$directory${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONPATH
exec "$@"
"""

# The directory goes to the interpreter as an argument: PYTHONPATH would reach what a verb starts.
CLIENT = f"""\
#!/bin/sh
# The gc-sidecar verbs that need the standard library only, with whatever python3 this image has.
{FIND_DIRECTORY}
python=${{GC_SIDECAR_PYTHON:-python3}}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "gc-sidecar: no $python here; set GC_SIDECAR_PYTHON to a CPython 3.9 or later" >&2
    exit 127
fi
exec "$python" -c '
import sys
directory = sys.argv.pop(1)
sys.path[:] = [directory] + [entry for entry in sys.path if entry]
if sys.version_info < (3, 9):
    sys.exit("gc-sidecar: set GC_SIDECAR_PYTHON to a CPython 3.9 or later; this is " + sys.version)
from gc_sidecar_agent.cli import main
sys.exit(main())
' "$directory" "$@"
"""


class InstallError(Exception):
    """The directory cannot be written; `str()` of it says which and why."""


@dataclass(frozen=True)
class Installation:
    """What `install_agent` left: the directory, and which of our files it wrote or took away."""

    directory: Path
    version: str
    endpoint_plugin: bool
    written: list[str]
    removed: list[str]

    @property
    def endpoint_plugin_removed(self) -> bool:
        """Whether an endpoint plugin was there before, and is no more."""
        return not self.endpoint_plugin and any(
            name.startswith(f"{ENDPOINT}-") for name in self.removed
        )


@dataclass(frozen=True)
class _File:
    content: bytes
    mode: int = FILE_MODE


def install_agent(directory: Path, endpoint_plugin: bool = False) -> Installation:
    """Write the injected tree into `directory`; raises InstallError.

    Done again, it writes only what differs, and takes away what an earlier version or an earlier
    `endpoint_plugin` had put there. Files that are not ours stay.
    """
    directory = directory.absolute()
    source = Path(gc_sidecar_agent.__file__).parent
    version = gc_sidecar_agent.__version__
    files = tree(source, version, endpoint_plugin)
    _check(directory, source, files)
    try:
        _make_directory(directory)
        earlier = _files_of_ours(directory, set(files))
        written = [name for name, file in files.items() if _write(directory, name, file)]
        # Dist-infos go before modules: an entry point never names a module that is not there.
        stale = sorted(earlier - set(files), key=lambda name: (".dist-info/" not in name, name))
        removed = [name for name in stale if _remove(directory, name)]
        _remove_empty_directories(directory)
    except OSError as error:
        where = error.filename or directory
        raise InstallError(f"cannot write {where}: {error.strerror}") from error
    return Installation(directory, version, endpoint_plugin, written, removed)


def tree(source: Path, version: str, endpoint_plugin: bool) -> dict[str, _File]:
    """Every file of the tree by its relative name, in the order in which they are to be written.

    The dist-info comes last: vLLM must not find an entry point before there is what it names.
    """
    modules = {
        f"{PACKAGE}/{path.relative_to(source).as_posix()}": _File(path.read_bytes())
        for path in _sources(source)
    }
    programs = {
        "bin/with-agent": _File(WITH_AGENT.encode(), PROGRAM_MODE),
        "bin/gc-sidecar": _File(CLIENT.encode(), PROGRAM_MODE),
    }
    files = {**modules, **programs}
    files |= _dist_info(
        PACKAGE, version, "The gc-sidecar agent inside vLLM", PLUGIN_ENTRY_POINTS, files
    )
    if endpoint_plugin:
        # A distribution of its own, for vLLM warns of every endpoint plugin that is installed and
        # not named in VLLM_PLUGINS.
        files |= _dist_info(
            ENDPOINT, version, "The gc-sidecar route on vLLM's port", ENDPOINT_ENTRY_POINTS, {}
        )
    return files


def _sources(source: Path) -> Iterator[Path]:
    """The files of the package that travel: no byte code, no tests."""
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        if path.is_file() and path.suffix in (".py", ".typed") and "tests" not in parts:
            yield path


def _dist_info(
    name: str, version: str, summary: str, entry_points: str, owned: dict[str, _File]
) -> dict[str, _File]:
    folder = f"{name}-{version}.dist-info"
    metadata = METADATA.format(name=name.replace("_", "-"), version=version, summary=summary)
    files = {
        f"{folder}/METADATA": _File(metadata.encode()),
        f"{folder}/INSTALLER": _File(b"gc-sidecar\n"),
        f"{folder}/entry_points.txt": _File(entry_points.encode()),
    }
    record = f"{folder}/RECORD"
    return {record: _File(_record({**owned, **files}, record)), **files}


def _record(files: dict[str, _File], record: str) -> bytes:
    """The list of files that every dist-info has; ours also tells a later version what is ours."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name, file in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.content).digest()).rstrip(b"=")
        writer.writerow([name, f"sha256={digest.decode()}", len(file.content)])
    writer.writerow([record, "", ""])
    return out.getvalue().encode()


def _check(directory: Path, source: Path, files: Iterable[str]) -> None:
    if os.pathsep in str(directory):
        raise InstallError(f"{directory} cannot be in PYTHONPATH: it contains {os.pathsep!r}")
    if directory.exists() and not directory.is_dir():
        raise InstallError(f"{directory} is not a directory")
    if directory.exists() and directory.resolve() == source.parent.resolve():
        raise InstallError(f"{directory} is where this gc-sidecar itself runs from")
    for name in files:
        link = _link_above(directory, name)
        if link is not None:
            raise InstallError(f"{link} is a symbolic link, and may lead anywhere")


def _files_of_ours(directory: Path, kept: set[str]) -> set[str]:
    """What the dist-infos of ours in `directory` list, and byte code whose module is gone."""
    ours: set[str] = set()
    for name in (PACKAGE, ENDPOINT):
        for folder in directory.glob(f"{name}-*.dist-info"):
            ours |= {f"{folder.name}/{path.name}" for path in folder.iterdir() if path.is_file()}
            with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error):
                rows = csv.reader((folder / "RECORD").read_text().splitlines())
                ours |= {row[0] for row in rows if row and _may_be_ours(row[0])}
    for path in (directory / PACKAGE).rglob("__pycache__/*.pyc"):
        module = path.parent.with_name(f"{path.name.split('.')[0]}.py")
        if module.relative_to(directory).as_posix() not in kept:
            ours.add(path.relative_to(directory).as_posix())
    return ours


def _may_be_ours(name: str) -> bool:
    """Whether a RECORD may name this file: it is data, and what it names is removed."""
    path = PurePosixPath(name)
    return (
        name.isprintable()
        and ".." not in path.parts
        and (path.parts[:1] == (PACKAGE,) or str(path) in ("bin/with-agent", "bin/gc-sidecar"))
    )


def _make_directory(path: Path) -> None:
    """Make `path` for every user to read, whatever the umask."""
    for missing in reversed([path, *path.parents]):
        if not missing.exists():
            missing.mkdir(exist_ok=True)
            missing.chmod(DIRECTORY_MODE)


def _write(directory: Path, name: str, file: _File) -> bool:
    """Put `file` in its place at once; whether anything had to be done."""
    path = directory / name
    if _is_there(path, file):
        return False
    _make_directory(path.parent)
    if path.parent != directory:
        _open_to_all(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(file.content)
            os.fchmod(out.fileno(), file.mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return True


def _open_to_all(folder: Path) -> None:
    """A folder of ours that an earlier umask had closed."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & DIRECTORY_MODE != DIRECTORY_MODE:
        folder.chmod(mode | DIRECTORY_MODE)


def _is_there(path: Path, file: _File) -> bool:
    try:
        status = path.lstat()
        return (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == file.mode
            and path.read_bytes() == file.content
        )
    except OSError:
        return False


def _link_above(directory: Path, name: str) -> Path | None:
    """The folder between `directory` and the file `name` that is a symbolic link, if one is."""
    folders = [directory / parent for parent in PurePosixPath(name).parents if parent.name]
    return next((folder for folder in folders if folder.is_symlink()), None)


def _remove(directory: Path, name: str) -> bool:
    if _link_above(directory, name) is not None:
        return False
    try:
        (directory / name).unlink()
    except FileNotFoundError:
        return False
    return True


def _remove_empty_directories(directory: Path) -> None:
    """Drop the folders of ours that hold nothing any more."""
    folders = [path for path in (directory / PACKAGE).rglob("*") if path.is_dir()]
    for name in (PACKAGE, ENDPOINT):
        folders += directory.glob(f"{name}-*.dist-info")
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
