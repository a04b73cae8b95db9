"""Without a network a job says so in seconds; a Hub that is slow or broken is one that can be reached."""

import json
import os
import socket
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, is_offline_mode
from test_sft import trainer_for
from typer.testing import CliRunner

from hf_speedkit.cli.main import app
from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import hub_access
from hf_speedkit.trainer.dataset_source import load_rows
from hf_speedkit.trainer.hub_access import HubName, require_hub, require_hub_for, why_unreachable

MODEL, DATASET = HubName(kind="model", name="owner/Model"), HubName(kind="dataset", name="owner/DataSet")
at_once = partial(why_unreachable, pauses_s=(0.0, 0.0), timeout_s=2.0)


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    """As on a machine where nobody has set HF_HUB_OFFLINE, with caches that are empty."""
    import datasets.config

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False)
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(hub_access, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None))


@pytest.fixture
def nobody(monkeypatch, free_port):
    """A Hub at a port where nobody listens."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port}")


def cached(folder, kind):
    path = folder / ("hub/models--owner--Model/snapshots/1" if kind == "model" else "datasets/owner___data_set/a/b/c")
    path.mkdir(parents=True)
    if kind == "model":
        (path / "config.json").write_text("{}")
        refs = folder / "hub/models--owner--Model/refs"
        refs.mkdir()
        (refs / "main").write_text("1")
    return path


def test_nobody_there_is_tried_again_and_told_with_the_reason(nobody, caplog):
    assert "refused" in at_once()
    assert caplog.text.count("tried for 0 s more") == 1


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", b"", None], ids=str)
def test_a_hub_that_fails_or_is_slow_is_reached(monkeypatch, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with server.accept()[0] as connection:
                connection.recv(4096)
                if answer is None:
                    given_up.wait(10)  # it never answers
                else:
                    connection.sendall(answer)

        given_up = threading.Event()
        served = threading.Thread(target=serve)
        served.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert why_unreachable(timeout_s=0.2) is None
        given_up.set()
        served.join()


def test_a_connection_that_takes_long_is_not_called_impossible_but_told(monkeypatch, caplog):
    class ConnectTimeout(Exception):
        """Of httpx."""

    def head(*_, **__):
        raise ConnectTimeout

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    assert why_unreachable() is None
    assert "takes no connection within 5 s" in caplog.text
    assert "HF_HUB_OFFLINE=1" in caplog.text


def test_what_needs_no_hub_asks_nobody(tmp_path, monkeypatch):
    def fails():
        raise AssertionError("asked")

    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "Model").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = ("owner/Model", "./nothing", "/no/such", "~/x", "a/b/c", "rows.jsonl", "", str(tmp_path))
    require_hub([HubName(kind="model", name=name) for name in paths], why=fails)
    require_hub_for({"tiny_chat": True, "model_name_or_path": "a/b"})
    require_hub([HubName(kind="dataset", name="json")], why=fails)  # a reader of datasets, not a repository
    cached(tmp_path, "dataset")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    require_hub([DATASET], why=fails)


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_by_a_setting_the_empty_cache_is_told_with_the_commands_and_nobody_is_asked(
    tmp_path, monkeypatch, setting
):
    monkeypatch.setenv(setting, "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", setting == "HF_HUB_OFFLINE")
    model = replace(MODEL, weights=False)
    whole = setting == "HF_HUB_OFFLINE"
    with pytest.raises(ConfigurationError, match=f"{setting} is set, and what is asked for is not in the") as told:
        require_hub([model, DATASET] if whole else [DATASET], why=lambda: pytest.fail("asked"))
    assert ("hf download owner/Model --exclude" in told.value.mend) == whole
    assert "datasets.load_dataset('owner/DataSet')" in told.value.mend
    for kind in ("model", "dataset"):
        cached(tmp_path, kind)
    require_hub([model, DATASET] if whole else [DATASET], why=lambda: pytest.fail("asked"))
    if whole:
        with pytest.raises(ConfigurationError, match="push_to_hub: false, or unset HF_HUB_OFFLINE"):
            require_hub([model], why=lambda: pytest.fail("asked"), uploads=True)


def test_a_push_without_a_login_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    job = {"model_name_or_path": str(tmp_path), "dataset_name": str(tmp_path), "push_to_hub": "true"}
    monkeypatch.setattr(hub_access, "why_unreachable", lambda: None)
    with pytest.raises(ConfigurationError, match="hf auth login, with a token that may write"):
        require_hub_for(job)
    require_hub_for({**job, "hub_token": "hf_x"})
    (tmp_path / "token").write_text("hf_y")
    require_hub_for(job)


@pytest.mark.parametrize("there", [(), ("model",), ("dataset",)], ids=str)
def test_what_the_cache_lacks_is_named_with_the_commands_that_fill_it(tmp_path, nobody, there):
    for kind in there:
        cached(tmp_path, kind)
    job = {"model_name_or_path": "owner/Model", "model_revision": "v2", "random_weights": True}
    job |= {"dataset_name": "owner/DataSet", "dataset_config": "en"}
    if there == ("model",):
        job["model_revision"] = "main"
    with pytest.raises(ConfigurationError, match=r"cannot be reached from this machine.*not in the cache") as told:
        require_hub_for(job)
    assert constants.ENDPOINT in told.value.evidence[0]
    hub = 'hf download owner/Model --revision v2 --exclude "*.safetensors" "*.bin"'
    data = "python -c \"import datasets; datasets.load_dataset('owner/DataSet', 'en')\""
    assert (hub in told.value.mend) == ("model" not in there)
    assert (data in told.value.mend) == ("dataset" not in there)
    assert "HF_HUB_OFFLINE=1" in told.value.mend
    assert not is_offline_mode()


def test_what_is_cached_is_used_at_once_by_our_own_programs_and_told_to_others(tmp_path, nobody, monkeypatch, caplog):
    import datasets.config

    snapshot = cached(tmp_path, "model")
    cached(tmp_path, "dataset")
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (snapshot / parts["a"]).touch()
    with pytest.raises(ConfigurationError, match=r"with all of its weights\nMend it: .*download owner/Model;"):
        require_hub([MODEL, DATASET], why=at_once)
    (snapshot / parts["b"]).touch()
    require_hub([MODEL, DATASET], why=at_once)
    assert not is_offline_mode()
    assert "HF_HUB_OFFLINE=1 uses the cache at once" in caplog.text
    with pytest.raises(ConfigurationError, match="push_to_hub needs it"):
        require_hub([MODEL], why=at_once, uploads=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that it is put back
    require_hub([MODEL, DATASET], why=at_once, go_offline=True)
    assert is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "ask",
    [lambda path: trainer_for(path, model="owner/Model"), lambda path: load_rows("owner/DataSet")],
    ids=["SpeedSFTTrainer", "load_rows"],
)
def test_trainer_and_data_stop_before_the_first_request(tmp_path, nobody, ask):
    with pytest.raises(ConfigurationError, match="cannot be reached from this machine"):
        ask(tmp_path)


def test_plan_says_so_in_json_too_and_exits_as_for_a_name_that_does_not_exist(nobody):
    ended = CliRunner().invoke(app, ["plan", "owner/Model", "owner/DataSet", "--json"])
    assert ended.exit_code == 2
    assert '"error": "the Hugging Face Hub cannot be reached' in ended.stdout
    assert "Mend it:  where there is a network: hf download owner/Model" in ended.stderr
