"""doctor in the engine's container: each planted fault is found by its check, with a remedy that names what to do,
and a sound engine gives nothing above ok.

The tree is a real one, the engine a real process with a real agent; only its vLLM is a stand-in, a package of
a few lines that ends whoever imports it without being an engine.
"""

from __future__ import annotations

import atexit
import compileall
import contextlib
import ctypes
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gc_sidecar.install import install_agent
from gc_sidecar_agent import agent, endpoint
from gc_sidecar_agent.board import BOARD_NAME, Board, Lease, write_board
from gc_sidecar_agent.cli import main
from gc_sidecar_agent.command import Command
from gc_sidecar_agent.commands import doctor
from gc_sidecar_agent.doctor import run_dir_checks, site
from gc_sidecar_agent.doctor.engine_checks import check_engine
from gc_sidecar_agent.doctor.engine_process import (
    CommandLine,
    Engine,
    find_engines,
    interpreter_path,
    read_engine,
)
from gc_sidecar_agent.doctor.findings import examine, ok
from gc_sidecar_agent.doctor.interpreter import Interpreter
from gc_sidecar_agent.doctor.run_dir_checks import examine_run_directory, file_system_of
from gc_sidecar_agent.page import list_pages, read_page
from tests.leaving_out import leave_out
from tests.unit.agent.diagnosis import Diagnosis, memory_volume
from tests.unit.agent.own_process import in_own_process
from tests.unit.agent.waiting import wait_until

SERVER = "vllm.entrypoints.openai.api_server"
ALL_PLUGINS = "gc_sidecar,lora_filesystem_resolver,lora_hf_hub_resolver"
NOBODY = 65534

STAND_IN = '''
"""A stand-in for vLLM. Who imports it and is no engine (the doctor) ends."""
import sys
if sys.argv[0] == "-c":
    raise SystemExit("vllm was imported")
'''

# What vLLM's API server, engine core and worker in one process would have started.
STAND_IN_SERVER = """
import os, time
try:
    from gc_sidecar_agent.agent import Topology, this_process
except ImportError:
    pass
else:
    topology = Topology(dp_ranks=(0,), workers=1, api_servers=1)
    for role in ("api_server", "engine_core", "worker"):
        this_process().start(role, 0, 0, topology, "stand-in")
    exec(os.environ.get("STAND_IN_DOES", ""))
    this_process().set_ready()
print("ready", flush=True)
time.sleep(600)
"""

OWN_PLUGINS = """\
[vllm.general_plugins]
lora_filesystem_resolver = vllm.plugins:a
lora_hf_hub_resolver = vllm.plugins:b
"""


@functools.cache
def temporary_directory() -> Path:
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    return Path(directory)


@functools.cache
def image_python() -> str:
    """The interpreter of an engine's image. It is not the one of these tests, in which gc-sidecar may be
    installed, and has no packages of its own: to look through hundreds takes longer than all else."""
    base = getattr(sys, "_base_executable", sys.executable)
    environment = temporary_directory() / "python"
    subprocess.run([base, "-m", "venv", "--without-pip", environment], check=True)
    return str(environment / "bin" / "python")


@functools.cache
def compiled_tree() -> Path:
    """The injected tree as it is once an engine has run with it."""
    tree = temporary_directory() / "agent"
    install_agent(tree, endpoint_plugin=True)
    compileall.compile_dir(tree, quiet=1)
    return tree


def files_in(directory: Path) -> dict[str, tuple[int, int]]:
    """What would tell that somebody has changed, added or removed a file, byte code aside."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a file of the tree is one file in all images
    path.write_text(text)
    return path


def write_distribution(directory: Path, name: str, version: str, entry_points: str = "") -> None:
    info = directory / f"{name}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "entry_points.txt", entry_points)


def write_files(root: Path) -> Path:
    """The files of an engine's container: the tree, a vLLM that is a stand-in, a directory to work in."""
    (root / "work").mkdir(parents=True)
    shutil.copytree(compiled_tree(), root / "agent", copy_function=os.link)
    packages = root / "packages"
    write(packages / "vllm" / "__init__.py", STAND_IN)
    write(packages / "vllm" / "entrypoints" / "openai" / "api_server.py", STAND_IN_SERVER)
    write_distribution(packages, "vllm", "0.32.0", OWN_PLUGINS)
    return root


@functools.cache
def shared_files() -> tuple[Path, dict[str, tuple[int, int]]]:
    """The files of a container whose tests plant nothing in them, and how they are."""
    root = write_files(temporary_directory() / "image")
    return root, files_in(root)


@functools.cache
def answers() -> dict[str, dict[str, Any]]:
    """What interpreters have answered by all that an answer depends on."""
    return {}


def ask_once(
    self: Interpreter, question: Callable[[], None], *arguments: str, timeout_s: float
) -> dict[str, Any]:
    """Interpreter.ask, once for each interpreter, module path and question: where the files stay as they are,
    neither the variables of vLLM nor ours change its answer."""
    variables = {n: v for n, v in self.environment.items() if n.startswith(("PYTHON", "PATH"))}
    place = (self.path, self.flags, self.directory, self.first, sorted(variables.items()))
    key = repr((place, question.__name__, arguments))
    if key not in answers():
        answers()[key] = ASK(self, question, *arguments, timeout_s=timeout_s)
    return answers()[key]


ASK = Interpreter.ask


@dataclass
class Image:
    """An engine's container: its files, the environment, the engine's command line."""

    root: Path
    run_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    own_environment: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.agent = self.root / "agent"
        self.packages = self.root / "packages"
        self.work = self.root / "work"
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{self.agent}:{self.packages}",
            "GC_SIDECAR_RUN_DIR": str(self.run_dir),
            "VLLM_PLUGINS": ALL_PLUGINS,
        }
        # The container's own: `with-agent` puts the tree before it.
        self.own_environment = {**self.environment, "PYTHONPATH": str(self.packages)}
        self.command = [image_python(), "-m", SERVER, "--host", "127.0.0.1"]

    def set_vllm(self, version: str) -> None:
        for info in self.packages.glob("vllm-*.dist-info"):
            shutil.rmtree(info)
        write_distribution(self.packages, "vllm", version, OWN_PLUGINS)

    def set(self, **variables: str | None) -> None:
        """Variables of the engine and of the container; None unsets one."""
        for environment in (self.environment, self.own_environment):
            for name, value in variables.items():
                environment.pop(name, None)
                if value is not None:
                    environment[name] = value

    def prepend(self, directory: Path) -> None:
        """Put `directory` before everything in PYTHONPATH."""
        for environment in (self.environment, self.own_environment):
            environment["PYTHONPATH"] = f"{directory}:{environment['PYTHONPATH']}"

    def start(self) -> int:
        """Start an engine; its pid, once it has said that it is ready."""
        process = subprocess.Popen(
            self.command, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.cleanup.callback(end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the stand-in did not start"
        run_dir = self.environment.get("GC_SIDECAR_RUN_DIR", "")
        if run_dir and os.path.isdir(run_dir) and list_pages(run_dir):
            wait_until(lambda: is_described(run_dir), what="a page that says ready")
        return process.pid

    def doctor(self, *arguments: str) -> Diagnosis:
        """What `DIR/bin/gc-sidecar doctor` finds in this container."""
        command = [str(self.agent / "bin" / "gc-sidecar"), "doctor", "--json", *arguments]
        environment = {"GC_SIDECAR_PYTHON": image_python(), **self.own_environment}
        result = subprocess.run(
            command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=60
        )
        assert result.stdout, result.stderr
        return Diagnosis(json.loads(result.stdout), result.returncode)

    def examine(self, from_tree: bool = True) -> Diagnosis:
        """Start the engine and examine it, in this process: a third of the time that the program takes.

        Without `from_tree` as an installed gc-sidecar would, which is no tree itself.
        """
        arguments = ["--agent-dir", str(self.agent)] if from_tree else []
        return self._judge("--pid", str(self.start()), *arguments)

    def preflight(self, *arguments: str) -> Diagnosis:
        """What `doctor --preflight` finds in this container; in this process, too."""
        where = ["--agent-dir", str(self.agent), "--python", image_python()]
        return self._judge("--preflight", *where, *arguments)

    def _judge(self, *arguments: str) -> Diagnosis:
        out = io.StringIO()
        with (
            mock.patch.dict(os.environ, self.own_environment, clear=True),
            working_in(self.work),
            contextlib.redirect_stdout(out),
        ):
            code = main(["doctor", "--json", *arguments])
        return Diagnosis(json.loads(out.getvalue()), code)


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def is_described(run_dir: str) -> bool:
    pages = [read_page(run_dir, name) for name in list_pages(run_dir)]
    return all(page.description["state"]["ready"] and page.numbers["heartbeat"] for page in pages)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with memory_volume() as directory:
        yield directory


@pytest.fixture
def image(tmp_path: Path, run_dir: Path) -> Iterator[Image]:
    """A container whose files are the test's own."""
    image = Image(write_files(tmp_path / "image"), run_dir)
    with image.cleanup:
        yield image


@pytest.fixture
def sound_image(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Image]:
    """A container whose files all is well with, and stay as they are: many tests have them."""
    monkeypatch.setattr(Interpreter, "ask", ask_once)
    root, files = shared_files()
    image = Image(root, run_dir)
    with image.cleanup:
        yield image
    assert files_in(root) == files, "this test changes files: let it have an `image` of its own"


# --- a sound engine ---


def test_a_sound_engine_gives_nothing_above_ok(sound_image: Image) -> None:
    diagnosis = sound_image.doctor("--pid", str(sound_image.start()))
    diagnosis.assert_sound()
    assert {finding["remedy"] for finding in diagnosis.document["findings"]} == {None}
    checks = [finding["check"] for finding in diagnosis.document["findings"]]
    assert len(checks) >= 20
    assert os.listdir(sound_image.run_dir) == list_pages(
        str(sound_image.run_dir)
    )  # nothing of ours is left


def test_before_the_engine_starts_a_sound_environment_gives_nothing_above_ok(image: Image) -> None:
    image.doctor("--preflight").assert_sound()  # to be started by with-agent
    image.own_environment = image.environment
    image.preflight().assert_sound()
    image.set(VLLM_PLUGINS=None)
    install_agent(image.agent, endpoint_plugin=False)
    image.preflight().assert_sound()


def test_what_with_agent_starts_is_sound(sound_image: Image) -> None:
    sound_image.command.insert(0, str(sound_image.agent / "bin" / "with-agent"))
    sound_image.environment = sound_image.own_environment
    sound_image.doctor("--pid", str(sound_image.start())).assert_sound()


def test_dev_mode_on_loopback_and_an_extension_that_fits_are_sound(image: Image) -> None:
    write(image.packages / "vllm" / "__init__.py")
    write(image.packages / "vllm/v1/worker/gpu_worker.py", "class Worker:\n    rank = 0\n")
    image.set(VLLM_SERVER_DEV_MODE="1")
    image.command.append("--worker-extension-cls=gc_sidecar_agent.extension.GcWorkerExtension")
    diagnosis = image.examine()
    diagnosis.assert_sound()
    assert "worker_extension" in [finding["check"] for finding in diagnosis.document["findings"]]


# --- planted faults ---

Plant = Callable[[Image], None]


@dataclass
class Fault:
    """What is planted, the check that has to find it, and what its remedy has to name."""

    plant: Plant
    check: str
    level: str
    remedy: str
    # Whether it shows in other checks too. One cause should be one finding.
    others: tuple[str, ...] = ()
    # Whether a file is planted.
    own_files: bool = False


def start_without_the_agent(image: Image) -> None:
    image.environment["PYTHONPATH"] = str(image.packages)


def make_the_interpreter_deaf(image: Image) -> None:
    image.work = image.packages  # else the stand-in would not start at all
    image.command.insert(1, "-E")


def replace_the_path(image: Image) -> None:
    (image.root / "needed").mkdir()
    image.own_environment["PYTHONPATH"] += f":{image.root / 'needed'}"


def shadow_by_an_older_tree(image: Image) -> None:
    install_agent(image.root / "older")
    image.prepend(image.root / "older")


def shadow_by_a_folder(image: Image) -> None:
    shutil.copytree(image.agent / "gc_sidecar_agent", image.work / "gc_sidecar_agent")


def damage_the_tree(image: Image) -> None:
    meter = image.agent / "gc_sidecar_agent" / "meter.py"
    write(meter, meter.read_text() + "# half of an upda")


def leave_two_versions(image: Image) -> None:
    (info,) = image.agent.glob("gc_sidecar_agent-*.dist-info")
    shutil.copytree(info, image.agent / "gc_sidecar_agent-0.0.1.dist-info")


def lose_the_dist_info(image: Image) -> None:
    (info,) = image.agent.glob("gc_sidecar_agent-*.dist-info")
    shutil.rmtree(info)


def lose_the_entry_point(image: Image) -> None:
    (info,) = image.agent.glob("gc_sidecar_agent-*.dist-info")
    (info / "entry_points.txt").unlink()


def take_our_name(image: Image) -> None:
    (info,) = image.agent.glob("gc_sidecar_agent-*.dist-info")
    write(info / "entry_points.txt", "[vllm.general_plugins]\ngc_sidecar = another.thing:go\n")


def break_the_agent(image: Image) -> None:
    write(image.agent / "gc_sidecar_agent" / "plugin.py", "import a_module_that_is_missing")


def name_an_extension(module: str, name: str) -> Plant:
    def plant(image: Image) -> None:
        write(image.packages / "vllm" / "__init__.py")
        write(
            image.packages / "vllm/v1/worker/gpu_worker.py",
            "class Worker:\n    def load(self): ...\n",
        )
        write(
            image.packages / "users.py",
            "class Clashing:\n    def load(self): ...\nsomething = 1\n",
        )
        write(
            image.packages / "needy.py", "import a_module_that_is_missing\nclass Extension: ...\n"
        )
        image.command += ["--worker_extension_cls", f"{module}.{name}"]

    return plant


def set_variables(**variables: str | None) -> Plant:
    return lambda image: image.set(**variables)


def on_every_address(image: Image) -> None:
    image.set(VLLM_SERVER_DEV_MODE="1")
    image.command[-1] = "0.0.0.0"


def on_the_default_address(image: Image) -> None:
    image.set(VLLM_SERVER_DEV_MODE="1")
    del image.command[-2:]


def install_dynamo(image: Image) -> None:
    write(image.packages / "dynamo" / "__init__.py")
    image.set(DYN_FPM_GC_POLICY="freeze")


def run_at_start(code: str) -> Plant:
    """By a sitecustomize, which nobody sees from outside."""

    def plant(image: Image) -> None:
        write(image.root / "site" / "sitecustomize.py", code)
        for environment in (image.environment, image.own_environment):
            environment["PYTHONPATH"] += f":{image.root / 'site'}"

    return plant


def while_it_runs(code: str) -> Plant:
    return lambda image: image.environment.update(STAND_IN_DOES=code)


def use_another_run_dir(image: Image) -> None:
    image.own_environment["GC_SIDECAR_RUN_DIR"] = str(image.root)


def use_a_disk(image: Image) -> None:
    where = next((d for d in (image.root, Path("/var/tmp"), Path.home()) if is_disk(d)), None)
    assert where is not None, "this test needs a directory that is not in memory"
    disk = tempfile.TemporaryDirectory(dir=where)
    image.cleanup.callback(disk.cleanup)
    os.chmod(disk.name, 0o2770)
    image.set(GC_SIDECAR_RUN_DIR=disk.name)


def is_disk(directory: Path) -> bool:
    return file_system_of(str(directory)) not in ("tmpfs", "ramfs", None)


def open_the_run_dir(image: Image) -> None:
    image.run_dir.chmod(0o777)


def share_with_another_engine(image: Image) -> None:
    # The same places, filled by another process: as if two pods mounted one volume. An agent removes a page of
    # its own place only where its process is dead.
    image.start()


def empty_the_token(image: Image) -> None:
    write(image.run_dir / "endpoint.token")


def update_while_it_runs(image: Image) -> None:
    image.set(STAND_IN_DOES="import gc_sidecar_agent.agent as a; a.__version__ = '0.0.9'")


FAULTS = {
    "the agent is not on the path": Fault(
        start_without_the_agent, "python_path", "error", "bin/with-agent", ("pages",)
    ),
    "the path is not looked at": Fault(
        make_the_interpreter_deaf, "python_path", "error", "-E", ("pages",)
    ),
    "the image's own path is replaced": Fault(
        replace_the_path, "python_path_replaced", "warning", "bin/with-agent", own_files=True
    ),
    "another tree comes first": Fault(
        shadow_by_an_older_tree, "agent_shadowed", "error", "older/gc_sidecar_agent", own_files=True
    ),
    "a folder has the package's name": Fault(
        shadow_by_a_folder, "agent_shadowed", "error", "work/gc_sidecar_agent", own_files=True
    ),
    "a file of the tree is damaged": Fault(
        damage_the_tree, "agent_tree", "error", "install-agent", own_files=True
    ),
    "two versions in one tree": Fault(
        leave_two_versions, "agent_tree", "error", "install-agent", own_files=True
    ),
    "no dist-info": Fault(
        lose_the_dist_info, "agent_tree", "error", "install-agent", own_files=True
    ),
    "no entry point": Fault(
        lose_the_entry_point,
        "entry_point",
        "error",
        "install-agent",
        ("agent_tree",),
        own_files=True,
    ),
    "another plugin has our name": Fault(
        take_our_name, "entry_point", "error", "PYTHONPATH", ("agent_tree",), own_files=True
    ),
    "the agent cannot be imported": Fault(
        break_the_agent, "agent_import", "error", "install-agent", ("agent_tree",), own_files=True
    ),
    "plugins are not allowed": Fault(
        set_variables(VLLM_PLUGINS="lora_hf_hub_resolver"),
        "plugins_allowed",
        "error",
        "VLLM_PLUGINS=gc_sidecar,lora_hf_hub_resolver",
    ),
    "no plugin at all is allowed": Fault(
        set_variables(VLLM_PLUGINS=""), "plugins_allowed", "error", f"VLLM_PLUGINS={ALL_PLUGINS}"
    ),
    "our plugin's name is mistyped": Fault(
        set_variables(VLLM_PLUGINS="gc-sidecar"),
        "plugins_allowed",
        "error",
        f"VLLM_PLUGINS={ALL_PLUGINS}; no plugin that is installed is called gc-sidecar",
    ),
    "a blank in the list of plugins": Fault(
        set_variables(VLLM_PLUGINS="theirs, gc_sidecar"),
        "plugins_allowed",
        "error",
        "without blanks",
    ),
    "vLLM's own plugins are shut out": Fault(
        set_variables(VLLM_PLUGINS="gc_sidecar"), "plugins_shut_out", "warning", ALL_PLUGINS
    ),
    "the endpoint is not named": Fault(
        set_variables(VLLM_PLUGINS=None),
        "endpoint_plugin",
        "warning",
        f"VLLM_PLUGINS={ALL_PLUGINS}",
    ),
    "vLLM has no endpoint plugins": Fault(
        lambda image: image.set_vllm("0.27.1"),
        "endpoint_plugin",
        "warning",
        "upgrade vLLM",
        own_files=True,
    ),
    "vLLM is below the floor": Fault(
        lambda image: image.set_vllm("0.24.0rc1"), "vllm_version", "error", "0.25", own_files=True
    ),
    "an extension's module is missing": Fault(
        name_an_extension("nowhere", "Extension"),
        "worker_extension",
        "error",
        "holds nowhere",
        own_files=True,
    ),
    "an extension's own import fails": Fault(
        name_an_extension("needy", "Extension"),
        "worker_extension",
        "error",
        "a_module_that_is_missing",
        own_files=True,
    ),
    "an extension is not there": Fault(
        name_an_extension("users", "Absent"),
        "worker_extension",
        "error",
        "package.module.Class",
        own_files=True,
    ),
    "an extension is no class": Fault(
        name_an_extension("users", "something"),
        "worker_extension",
        "error",
        "package.module.Class",
        own_files=True,
    ),
    "an extension clashes": Fault(
        name_an_extension("users", "Clashing"),
        "worker_extension",
        "error",
        "rename it",
        own_files=True,
    ),
    "dev mode on every address": Fault(on_every_address, "dev_mode", "warning", "--host 127.0.0.1"),
    "dev mode on the default address": Fault(
        on_the_default_address, "dev_mode", "warning", "--host 127.0.0.1"
    ),
    "vLLM's GC debugger": Fault(
        set_variables(VLLM_GC_DEBUG='{"top_objects": 5}'), "gc_debug", "warning", "VLLM_GC_DEBUG"
    ),
    "a variable that sets nothing": Fault(
        set_variables(PYTHONGC="0"), "gc_variables", "warning", "PYTHONGC"
    ),
    "dynamo sets GC too": Fault(
        install_dynamo, "dynamo", "warning", "unset DYN_FPM_GC_POLICY", own_files=True
    ),
    "an interval that is no number": Fault(
        set_variables(GC_SIDECAR_POLICY="freeze", GC_SIDECAR_INTERVAL_S="soon"),
        "gate",
        "warning",
        "GC_SIDECAR_INTERVAL_S=60",
    ),
    "a lease with a unit": Fault(
        set_variables(GC_SIDECAR_POLICY="freeze", GC_SIDECAR_LEASE_S="1h"),
        "gate",
        "warning",
        "plain seconds, without a unit: GC_SIDECAR_LEASE_S=3600",
    ),
    "somebody has disabled GC": Fault(
        run_at_start("import gc; gc.disable()"), "live_gc", "warning", "gc.disable", own_files=True
    ),
    "somebody holds full collections off": Fault(
        while_it_runs("import gc; gc.set_threshold(700, 10, 1 << 30)"),
        "live_gc",
        "warning",
        "gc.set_threshold",
    ),
    "an incremental collector": Fault(
        run_at_start("import gc; gc.set_threshold(700, 10, 0); gc.set_threshold = lambda *a: None"),
        "collector",
        "error",
        "3.14.5",
        own_files=True,
    ),
    "a free-threaded interpreter": Fault(
        run_at_start("import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"),
        "collector",
        "error",
        "3.10 to 3.13",
        own_files=True,
    ),
    "no run directory is set": Fault(
        set_variables(GC_SIDECAR_RUN_DIR=None), "run_dir", "warning", "GC_SIDECAR_RUN_DIR"
    ),
    "the run directory is missing": Fault(
        set_variables(GC_SIDECAR_RUN_DIR="/nowhere/run"), "run_dir", "error", "install -d -m 2770"
    ),
    "the run directory is relative": Fault(
        set_variables(GC_SIDECAR_RUN_DIR="run"), "run_dir", "error", "in full"
    ),
    "the run directory is a file": Fault(
        lambda image: image.set(GC_SIDECAR_RUN_DIR=str(write(image.root / "file"))),
        "run_dir",
        "error",
        "name a directory",
        own_files=True,
    ),
    "two run directories": Fault(use_another_run_dir, "run_dir_differs", "warning", "set it once"),
    "the run directory is on disk": Fault(
        use_a_disk, "run_dir_memory", "warning", "medium: Memory", own_files=True
    ),
    "the run directory is not setgid": Fault(
        open_the_run_dir, "run_dir_mode", "warning", "fsGroup"
    ),
    "two engines share a run directory": Fault(
        share_with_another_engine, "pages", "error", "of its own"
    ),
    "the secret is empty": Fault(empty_the_token, "endpoint_token", "error", "remove the file"),
    "the engine runs an older agent": Fault(
        update_while_it_runs, "live_agents", "warning", "restart the engine"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_the_remedy_says_what_to_do(
    name: str, request: pytest.FixtureRequest
) -> None:
    fault = FAULTS[name]
    image: Image = request.getfixturevalue("image" if fault.own_files else "sound_image")
    fault.plant(image)
    diagnosis = image.examine()
    finding = diagnosis.find(fault.check, fault.level)
    assert fault.remedy in finding["remedy"]
    assert {f["check"] for f in diagnosis.bad} == {fault.check, *fault.others}
    assert diagnosis.code == {"error": 1, "warning": 4}[diagnosis.document["worst"]]
    for each in diagnosis.document["findings"]:
        assert "\n" not in each["reason"] + (each["remedy"] or "")


def test_warnings_alone_need_not_fail(sound_image: Image) -> None:
    sound_image.set(VLLM_GC_DEBUG="1")
    assert sound_image.doctor("--preflight").code == 4
    assert sound_image.preflight("--fail-on", "warning").code == 4
    sound_image.own_environment["GC_SIDECAR_FAIL_ON"] = "error"
    diagnosis = sound_image.preflight()
    assert (diagnosis.document["worst"], diagnosis.code) == ("warning", 0)
    sound_image.set(GC_SIDECAR_POLICY="frozen")
    assert sound_image.preflight().code == 1


def test_from_no_tree_no_program_of_one_is_named(sound_image: Image) -> None:
    start_without_the_agent(sound_image)
    diagnosis = sound_image.examine(from_tree=False)
    source = str(Path(site.__file__).parents[2])
    for check in ("agent_tree", "python_path"):
        finding = diagnosis.find(check, "error")
        assert "gc-sidecar install-agent DIR" in finding["remedy"]
        assert source not in finding["remedy"]


# --- faults of an environment in which no engine runs yet ---


def test_a_policy_that_the_gate_refuses_is_an_error(sound_image: Image) -> None:
    sound_image.set(GC_SIDECAR_POLICY="Freeze")
    finding = sound_image.preflight().find("gate", "error")
    assert "GC_SIDECAR_POLICY='Freeze'" in finding["reason"]
    assert "to off, freeze or budget" in finding["remedy"]


def test_budget_at_the_gate_is_sound(sound_image: Image) -> None:
    sound_image.set(GC_SIDECAR_POLICY="budget", GC_SIDECAR_PAUSE_BUDGET_MS="5")
    sound_image.preflight().assert_sound()


def test_a_board_that_was_left_is_told_at_the_gate(sound_image: Image) -> None:
    sound_image.set(GC_SIDECAR_POLICY="freeze")
    write_board(str(sound_image.run_dir), Board(Command("restore", "r", 7)))
    diagnosis = sound_image.preflight()
    diagnosis.assert_sound()
    (gate,) = [f for f in diagnosis.document["findings"] if f["check"] == "gate"]
    assert "left on the board (restore) does not keep it" in gate["reason"]
    bench = Command("freeze", "f", 8, owner="bench-1")
    write_board(str(sound_image.run_dir), Board(bench, lease=Lease(1, 60.0, time.time() + 60)))
    finding = sound_image.preflight().find("gate", "warning")
    assert "freeze by bench-1" in finding["reason"]
    assert str(sound_image.run_dir / BOARD_NAME) in finding["remedy"]


def test_the_published_name_acts_where_dynamo_is_not_installed(sound_image: Image) -> None:
    sound_image.set(DYN_FPM_GC_POLICY="freeze")
    diagnosis = sound_image.preflight()
    diagnosis.assert_sound()
    (gate,) = [f for f in diagnosis.document["findings"] if f["check"] == "gate"]
    assert "freeze" in gate["reason"]


def test_an_interpreter_without_vllm_is_an_error(image: Image) -> None:
    shutil.rmtree(image.packages)
    assert "--python" in image.preflight().find("vllm_version", "error")["remedy"]


def test_an_interpreter_that_does_not_answer_is_an_error(sound_image: Image) -> None:
    diagnosis = sound_image.preflight("--python", "/bin/false")
    assert "--python" in diagnosis.find("interpreter", "error")["remedy"]


def test_a_python_below_the_floor_is_an_error(sound_image: Image) -> None:
    for old in old_interpreters():
        diagnosis = sound_image.preflight("--python", str(old))
        assert "3.10" in diagnosis.find("python_version", "error")["reason"]
        if old.name == "python3.9":  # the oldest that the verbs themselves run on
            sound_image.own_environment["GC_SIDECAR_PYTHON"] = str(old)
            assert sound_image.doctor("--preflight").find("python_version", "error")
            del sound_image.own_environment["GC_SIDECAR_PYTHON"]


def old_interpreters() -> list[Path]:
    found = [Path(path) for v in (8, 9) if (path := shutil.which(f"python3.{v}"))]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True)
        versions = Path(root.stdout.strip(), "versions")
        found += [path for v in (8, 9) for path in versions.glob(f"3.{v}.*/bin/python3.{v}")]
    working = [
        path
        for path in found
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
    ]
    if not working:
        leave_out("no CPython 3.8 or 3.9 is here")
    return working


def test_a_mistyped_path_is_a_warning(sound_image: Image) -> None:
    sound_image.own_environment["PYTHONPATH"] = f"/agnet:{sound_image.packages}"
    finding = sound_image.preflight().find("python_path", "warning")
    assert "/agnet" in finding["reason"]
    assert "with-agent" in finding["remedy"]


def test_a_folder_here_would_shadow_the_agent_under_python_m(image: Image) -> None:
    shadow_by_a_folder(image)
    finding = image.preflight().find("agent_shadowed", "warning")
    assert "another directory" in finding["remedy"]


def test_dev_mode_without_an_engine_to_look_at_is_a_warning(sound_image: Image) -> None:
    sound_image.set(VLLM_SERVER_DEV_MODE="1")
    assert "127.0.0.1" in sound_image.preflight().find("dev_mode", "warning")["remedy"]


def test_an_extension_may_be_named_by_hand(sound_image: Image) -> None:
    diagnosis = sound_image.preflight("--worker-extension-cls", "nowhere.Extension")
    assert "nowhere" in diagnosis.find("worker_extension", "error")["remedy"]


def test_without_the_plugin_the_extension_covers_the_workers_only(image: Image) -> None:
    write(image.packages / "vllm" / "__init__.py")
    write(image.packages / "vllm/v1/worker/gpu_worker.py", "class Worker: ...\n")
    image.set(VLLM_PLUGINS="theirs")
    name = "gc_sidecar_agent.extension.GcWorkerExtension"
    diagnosis = image.preflight("--worker-extension-cls", name)
    assert "workers only" in diagnosis.find("plugins_allowed", "warning")["reason"]


def test_a_token_file_that_is_named_and_missing_is_an_error(sound_image: Image) -> None:
    sound_image.set(GC_SIDECAR_ENDPOINT_TOKEN_FILE="/nowhere/token")
    finding = sound_image.preflight().find("endpoint_token", "error")
    assert "/nowhere/token" in finding["reason"]


# --- faults that take root to plant ---


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.fail(
            "this test plants a fault that takes root (another user, a mount): run it as root"
        )


def mount(target: Path, *options: str) -> None:
    """A tmpfs that no other process sees and that goes with this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns = 0x00020000
    if libc.unshare(clone_newns) != 0:
        why = os.strerror(ctypes.get_errno())
        raise AssertionError(f"this test mounts a tmpfs, which takes root and CAP_SYS_ADMIN: {why}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", target], check=True)


def diagnose_run_dir(directory: Path) -> Diagnosis:
    findings = examine_run_directory(str(directory), 4)
    levels = {finding.level for finding in findings}
    return Diagnosis({"findings": [vars(f) for f in findings], "worst": str(levels)}, 0)


@in_own_process
def test_a_full_volume_is_an_error(tmp_path: Path) -> None:
    mount(tmp_path, "size=64k", "mode=2770")
    finding = diagnose_run_dir(tmp_path).find("run_dir_room", "error")
    assert "sizeLimit" in finding["remedy"]


@in_own_process
def test_a_volume_without_inodes_is_an_error(tmp_path: Path) -> None:
    mount(tmp_path, "nr_inodes=1", "mode=2770")
    assert diagnose_run_dir(tmp_path).find("run_dir_room", "error")


@in_own_process
def test_a_read_only_volume_is_an_error(tmp_path: Path) -> None:
    mount(tmp_path, "ro", "mode=2770")
    finding = diagnose_run_dir(tmp_path).find("run_dir_writable", "error")
    assert "readOnly" in finding["remedy"]


@in_own_process
def test_a_volume_for_four_pages_is_sound(tmp_path: Path) -> None:
    mount(tmp_path, "size=512k", "mode=2770")
    assert diagnose_run_dir(tmp_path).bad == []


def test_a_directory_of_another_user_is_an_error(run_dir: Path) -> None:
    need_root()
    run_dir.chmod(0o2755)
    as_another_user(tmp_path=run_dir)


@in_own_process
def as_another_user(tmp_path: Path) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    diagnosis = diagnose_run_dir(tmp_path)
    finding = diagnosis.find("run_dir_writable", "error")
    assert f"user {NOBODY}" in finding["reason"]
    assert "fsGroup" in finding["remedy"]
    assert "supplementalGroups" in diagnosis.find("run_dir_mode", "warning")["remedy"]


def test_an_engine_of_another_user_cannot_be_judged_and_that_is_said(sound_image: Image) -> None:
    need_root()
    look_as_another_user(pid=sound_image.start())


@in_own_process
def look_as_another_user(pid: int) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    engine = read_engine(pid)
    assert engine is not None
    assert engine.environment is None
    surveyed = site.survey(engine, None, None, None)
    (finding,) = check_engine(surveyed)
    assert (finding.level, finding.remedy) == (
        "warning",
        "run doctor as user 0, the engine's own",
    )


# --- finding the engine ---


def test_a_running_engine_is_found_by_itself(sound_image: Image) -> None:
    pid = sound_image.start()
    (engine,) = [each for each in find_engines() if each.pid == pid]
    assert engine.environment is not None
    assert engine.environment["PYTHONPATH"] == sound_image.environment["PYTHONPATH"]
    assert engine.flag("--host") == "127.0.0.1"
    assert interpreter_path(engine) == image_python()


def test_of_several_engines_each_is_judged(
    sound_image: Image, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # There may be others on this machine, which are none of our business.
    engines = [read_engine(sound_image.start())]
    sound_image.environment["VLLM_PLUGINS"] = "theirs"
    engines.append(read_engine(sound_image.start()))
    monkeypatch.setattr(doctor, "find_engines", lambda: engines)
    assert main(["doctor", "--json", "--agent-dir", str(sound_image.agent)]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    judged = {
        f["reason"].split(":")[0]: f["level"] for f in findings if f["check"] == "plugins_allowed"
    }
    assert list(judged.values()) == ["error", "ok"]
    assert list(judged) == [f"pid {engine.pid}" for engine in reversed(engines) if engine]


def test_one_whose_environment_vllm_has_overwritten_is_not_judged_by_it() -> None:
    with subprocess.Popen(
        ["VLLM::EngineCore"], executable="/bin/sh", stdin=subprocess.PIPE, env={"X": "1"}
    ) as process:
        engine = wait_until(lambda: read_engine(process.pid), what="a command line after exec")
        surveyed = site.survey(engine, None, None, None)
        process.kill()
    (finding,) = check_engine(surveyed)
    assert finding.level == "warning"
    assert "--pid" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("command", "is_engine"),
    [
        ("python -m vllm.entrypoints.openai.api_server --port 1", True),
        ("/opt/venv/bin/python3 -u -X dev -m vllm.entrypoints.cli.main serve M", True),
        ("/opt/venv/bin/python3 /opt/venv/bin/vllm serve M --host 127.0.0.1", True),
        ("vllm serve M", True),
        ("python3 -m dynamo.vllm --model M", True),
        ("python3 -um gc_sidecar.embedded --workers 4", True),
        ("/opt/venv/bin/python3 /opt/venv/bin/vllm bench serve --model M", False),
        ("vllm chat", False),
        ("python -m vllm.model_executor.models.registry", False),
        ("python -c import-vllm -m vllm.entrypoints.openai.api_server", False),
        ("python benchmark.py -m vllm.entrypoints.openai.api_server", False),
        ("grep vllm serve", False),
        ("sh -c vllm-serve", False),
        ("", False),
    ],
)
def test_an_engine_is_told_by_its_command_line(command: str, is_engine: bool) -> None:
    assert CommandLine(command.split()).is_engine is is_engine


def test_a_process_that_vllm_has_titled_is_found_by_who_started_it() -> None:
    # A shell under such a name, and a Python above it, as a script that makes an LLM() would have.
    code = (
        "import subprocess, sys; p = subprocess.Popen(['VLLM::EngineCore'], executable='/bin/sh',"
        " stdin=subprocess.PIPE); print(p.pid, flush=True); sys.stdin.read(); p.kill()"
    )
    with subprocess.Popen(
        ["python3", "-c", code],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        titled = int(process.stdout.readline())
        wait_until(lambda: read_engine(titled), what="a command line after exec")
        assert process.pid in [engine.pid for engine in find_engines()]
        assert [e.pid for e in doctor.choose_engines(titled, False)] == [process.pid]
        process.communicate("")


def test_a_flag_takes_either_spelling_and_the_last_one_wins() -> None:
    engine = Engine(1, ("vllm", "serve", "--host=a", "--worker_cls", "W", "--host", "b"))
    assert engine.flag("--host") == "b"
    assert engine.flag("--worker-cls") == "W"
    assert engine.flag("--port") is None


# --- the command ---


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pid", "0"],
        ["--pid", "x"],
        ["--pid", "4194399"],
        ["--python", "nowhere"],
        ["--fail-on", "all"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert arguments[0] in captured.err


def test_the_table_shows_what_is_wrong_first_and_what_to_do(sound_image: Image) -> None:
    sound_image.set(VLLM_GC_DEBUG="1", VLLM_PLUGINS="theirs")
    command = [str(sound_image.agent / "bin" / "gc-sidecar"), "doctor", "--preflight"]
    environment = {**sound_image.own_environment, "GC_SIDECAR_PYTHON": image_python()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("error    plugins_allowed")
    assert lines[1].strip().startswith("what to do: set VLLM_PLUGINS=")
    assert [line.split()[0] for line in lines if line and line[0] != " "][:4] == [
        "error",
        "warning",
        "ok",
        "ok",
    ]
    assert lines[-1].startswith("1 error, 1 warning, ")
    assert "\x1b" not in result.stdout


def test_a_check_that_fails_is_a_finding_and_keeps_no_other_from_its_work() -> None:
    def check_this(_: object) -> Iterator[Any]:
        raise RuntimeError("boom")

    def check_that(_: object) -> Iterator[Any]:
        yield ok("that", "fine")

    findings = examine([check_this, check_that], object())
    assert [(f.check, f.level) for f in findings] == [("this", "warning"), ("that", "ok")]
    assert "boom" in findings[0].reason


def test_the_names_are_those_of_the_modules_that_own_them() -> None:
    assert site.RUN_DIR_VARIABLE == agent.RUN_DIR_VARIABLE
    assert run_dir_checks.TOKEN_NAME == endpoint.TOKEN_NAME
    assert run_dir_checks.TOKEN_FILE_VARIABLE == endpoint.TOKEN_FILE_VARIABLE
