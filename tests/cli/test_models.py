"""`kvprobe models` lists what is here, and removes it."""

import json

import pytest

from kvprobe.files import store
from kvprobe.models import loading, pull
from support.models import document


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def keep(directory, **about):
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(b"w" * 1024)
    (directory / "config.json").write_text("{}")
    store.write_manifest(directory, about)
    return directory


def size_of(directory):
    return f"{sum(path.stat().st_size for path in directory.iterdir()) / 2**10:.2f} KiB"


def test_only_what_is_here_is_listed_and_what_can_be_pulled_is_said(main, own_home):
    done = main("models")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "`kvprobe pull NAME` fetches smollm2-135m or gemma3-270m or gpt2-tokenizer\n"
    keep(pull.place("smollm2-135m"))
    found = document(main("models", "--format", "json", "--quiet"))
    assert [(row["name"], row["state"]) for row in found["rows"]] == [("smollm2-135m", "pulled")]


def test_what_is_listed_can_be_a_model_and_what_is_only_kept_cannot(main, own_home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = (keep(pull.place(name)) for name in ("smollm2-135m", "gpt2-tokenizer"))
    conversion = keep(own_home / "gguf" / "00ff", name="mine")
    done = main("models", "--format", "json")
    assert [row["name"] for row in document(done)["rows"]] == ["smollm2-135m"]
    assert loading.find("smollm2-135m").directory == model
    assert done.stderr.splitlines()[-1] == (
        f"kept beside models: gpt2-tokenizer ({size_of(tokenizer)}), mine.gguf ({size_of(conversion)}); "
        "`kvprobe models --remove NAME` frees the space"
    )
    for name in ("gpt2-tokenizer", "mine.gguf"):
        assert main("sinks", name).returncode == 1
        assert main("models", "--remove", name).returncode == 0
    assert [place.exists() for place in (model, tokenizer, conversion)] == [True, False, False]
    assert "kept" not in main("models").stderr


@pytest.mark.parametrize("name", ["smollm2-135m", "mine.gguf"])
def test_what_is_removed_is_gone_alone_and_the_room_is_said(main, own_home, name):
    places = {
        "smollm2-135m": keep(pull.place("smollm2-135m")),
        "mine.gguf": keep(own_home / "gguf" / "00ff", name="mine"),
    }
    size = size_of(places[name])
    done = main("models", "--remove", name)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"removed {name}: {size} freed\n"
    assert [other for other, place in places.items() if place.exists()] == [other for other in places if other != name]
    assert list(own_home.rglob("*partial*")) == []
    done = main("models", "--remove", name)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvprobe: {name!r} was not fetched or converted here")


def test_a_kill_between_leaves_no_half_of_a_model(own_home, monkeypatch):
    from kvprobe.models import removal

    place = keep(pull.place("smollm2-135m"))
    monkeypatch.setattr(removal.shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        removal.remove("smollm2-135m")
    assert not place.exists()
    monkeypatch.undo()
    monkeypatch.setenv("KVPROBE_HOME", str(own_home))
    store.sweep_all()
    assert list(place.parent.glob(".*partial*")) == []


def test_a_repository_of_the_hubs_cache_is_left_to_the_hub(main, own_home, monkeypatch):
    from kvprobe.models import hub

    monkeypatch.setattr(hub, "cached_models", lambda: [{"name": "some/model", "bytes": 5}])
    done = main("models", "--remove", "some/model")
    assert (done.returncode, json.dumps(done.stdout)) == (1, '""')
    assert "remove it with `hf cache rm`" in done.stderr
