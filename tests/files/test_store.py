"""What is half made is swept once its maker is dead; a child ends with us; a damaged entry hides no other."""

import os
import select
import signal
import subprocess
import sys

import pytest

from kvprobe.errors import KvprobeError
from kvprobe.files import store
from kvprobe.files.whole import write_whole

# a command that makes a directory by a child; the child says that it has begun, and waits for a signal
MAKER = """
import signal, sys
from pathlib import Path
import click
from kvprobe.cli.main import run
from kvprobe.files.store import atomic_dir, run_watched
signal.signal(signal.SIGINT, signal.default_int_handler)
target, fifo = sys.argv[1:]
waiting = f"import signal; file = open({fifo!r}, 'w'); print('begun', file=file, flush=True); signal.pause()"
child = [sys.executable, "-c", waiting]
@click.command()
def make():
    atomic_dir(Path(target), lambda directory: run_watched(child, log=directory.parent / "log", watch=lambda: None))
run(make, [], name="make")
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone ends a child with its parent")


class Making:
    """A process that is making `target`, and the words of its child, which end with it."""

    def __init__(self, target):
        self.fifo = target.parent / "fifo"
        target.parent.mkdir(exist_ok=True)
        os.mkfifo(self.fifo)
        self.words = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        command = [sys.executable, "-c", MAKER, str(target), str(self.fifo)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.next_word() == b"begun\n"

    def next_word(self):
        """What the child says next; nothing once it is dead."""
        assert select.select([self.words], [], [], 60)[0]
        return os.read(self.words, 100)

    def end(self, number):
        self.process.send_signal(number)
        said = self.process.communicate()[1]
        gone = self.next_word() == b""
        os.close(self.words)
        self.fifo.unlink()
        return self.process.returncode, said, gone


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_child_and_leaves_nothing(tmp_path, number, status, said):
    making = Making(tmp_path / "models" / "one")
    assert making.end(number) == (status, f"\nkvprobe: {said}\n", True)
    assert entries(tmp_path / "models") == []


@linux
def test_a_kill_ends_the_child_too_and_the_next_run_for_another_target_clears_up(tmp_path):
    folder = tmp_path / "models"
    making = Making(folder / "one")
    # while it lives, it keeps what it makes
    store.sweep(folder)
    (partial,) = (name for name in entries(folder) if name != "fifo")
    assert partial.startswith(".one.partial-")
    assert making.end(signal.SIGKILL) == (-signal.SIGKILL, "", True)
    assert entries(folder) == [partial]
    store.atomic_dir(folder / "two", lambda directory: (directory / "file").write_text("two"))
    assert entries(folder) == ["two"]


def test_any_command_sweeps_every_folder_of_ours(main, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = {"gguf": ".abc.partial-x", "gqa": ".kv1.safetensors.partial", "texts": f".kvprobe-{dead.pid}-x"}
    kept = {"gguf": "abc", "gqa": "kv1.safetensors", "texts": f".kvprobe-{os.getpid()}-x"}
    for folder, name in left.items():
        (tmp_path / folder / kept[folder]).mkdir(parents=True)
        (tmp_path / folder / name).write_text("half")
    assert main("cache", "gpt2", "--quiet").returncode == 0
    assert {folder: entries(tmp_path / folder) for folder in left} == {folder: [name] for folder, name in kept.items()}


def test_a_training_under_way_keeps_the_snapshot_that_it_writes(tmp_path):
    (tmp_path / ".kv1.safetensors.partial").write_text("half")
    with store.try_lock(tmp_path / "kv1") as ours:
        assert ours
        store.sweep(tmp_path)
        assert entries(tmp_path) == [".kv1.safetensors.partial"]
    store.sweep(tmp_path)
    assert entries(tmp_path) == []


def test_a_write_that_is_killed_is_cleared_by_the_next_in_that_folder_and_one_that_lives_is_not(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from kvprobe.results.result import write_whole
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_whole(sys.argv[1], "new")
"""
    (tmp_path / "a").write_text("old")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False)
    assert len(entries(tmp_path)) == 2
    assert (tmp_path / "a").read_text() == "old"
    others = [f".kvprobe-{os.getpid()}-x", ".kvprobe-notes", ".kvprobe-my-notes"]
    for name in others:
        (tmp_path / name).write_text("not ours to remove")
    write_whole(tmp_path / "b", "b")
    assert entries(tmp_path) == sorted([*others, "a", "b"])


DAMAGED = [
    "", "[]", "null", "7", '"files"', "{}", '{"files": {}}', '{"files": []}', '{"files": 7}',
    '{"files": {"weights": 7}}',
    '{"files": {"weights": {"bytes": 7}}}', '{"files": {"weights": {"bytes": "7", "sha256": ""}}}',
    '{"files": {"weights": {"bytes": 7, "sha256": 7}}}', '{"files": {"weights\\u0000": {"bytes": 7, "sha256": ""}}}',
    '{"files": {"absent": {"bytes": 7, "sha256": ""}}}', "[" * 100_000, '{"files":' * 50_000, "9" * 5000, "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_an_entry_whose_manifest_is_not_ours_is_not_there_and_hides_no_other(main, tmp_path, monkeypatch, text):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / "gguf" / name).mkdir(parents=True)
        (tmp_path / "gguf" / name / "weights").write_text("weights")
        store.write_manifest(tmp_path / "gguf" / name, {"name": "whole"})
    (tmp_path / "gguf" / "a" / store.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    assert store.read_manifest(tmp_path / "gguf" / "a") is None
    done = main("models", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "kept beside models: whole.gguf (" in done.stderr


def test_a_home_of_no_user_is_one_line(main, monkeypatch):
    monkeypatch.setenv("KVPROBE_HOME", "~nosuchuser/x")
    for arguments in (["models"], ["sinks", "smollm2-135m"], ["pull", "gpt2-tokenizer"]):
        done = main(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("kvprobe: KVPROBE_HOME is '~nosuchuser/x', whose user has no home directory: set it to")


def test_a_home_that_is_a_file_is_one_line(main, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "file"))
    done = main("pull", "gpt2-tokenizer", "--quiet")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("Not a directory; set KVPROBE_HOME to a writable directory")


def test_a_home_may_be_relative_and_an_empty_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_HOME", "here")
    assert store.home().absolute() == (tmp_path.cwd() / "here")
    monkeypatch.setenv("KVPROBE_HOME", "")
    assert store.home().name == "kvprobe"


def test_a_home_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvprobeError, match=r"one could not be written to .*: Not a directory"):
        store.atomic_dir(tmp_path / "file" / "models" / "one", lambda directory: None)
