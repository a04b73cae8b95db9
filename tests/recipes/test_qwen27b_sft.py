"""The recipe: its two YAML files, its errors, and a whole tiny run through the launcher."""

import ast
import json
import os
import runpy
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import qwen27b_sft as recipe
import yaml
from rank_processes import start_ranks
from torch.multiprocessing import ProcessExitedException
from transformers import Qwen3Config
from trl import ModelConfig

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.trainer.dataset_source import load_rows
from hf_speedkit.trainer.job_settings import take_settings
from hf_speedkit.trainer.weights import load_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "qwen27b_sft.py"
TINY = ROOT / "recipes" / "tiny_sft.yaml"
REAL = ROOT / "recipes" / "qwen27b_sft.yaml"


def test_the_recipe_is_short_enough_to_read():
    assert len(SCRIPT.read_text().splitlines()) <= 150


def test_data_model_and_trainer_come_in_that_order():
    body = next(n for n in ast.parse(SCRIPT.read_text()).body if getattr(n, "name", "") == "main")
    text = ast.unparse(body)
    places = [text.index(word) for word in ("load_rows(recipe", "load_model(model_args", "SpeedSFTTrainer(model")]
    assert places == sorted(places)


def test_the_config_beside_the_script_is_read_by_default():
    assert recipe.config_file([]) == REAL
    assert recipe.config_file(["--config", str(TINY)]) == TINY
    assert recipe.config_file([f"--config={TINY}"]) == TINY


@pytest.mark.parametrize(
    ("given", "mend"),
    [("missing.yaml", "recipes/tiny_sft.yaml"), (str(TINY.with_name("tiny_stf.yaml")), f"did you mean {TINY}")],
    ids=["missing", "misspelt"],
)
def test_a_config_that_is_not_there_is_named(given, mend):
    with pytest.raises(ConfigurationError, match=f"no config file {given!r}") as refused:
        take_settings(recipe.config_file(["--config", given]), [])
    assert mend in refused.value.mend


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--use_cpu", "true"], {"use_cpu": True}),
        (["--use_cpu"], {"use_cpu": True}),
        (["--use_cpu", "--seed", "3"], {"use_cpu": True, "seed": 3}),
        (["--expected_parameters=8.0e+9"], {"expected_parameters": 8e9}),
        (["--use-cpu", "--resume_from_checkpoint", "true"], {"use_cpu": True, "resume_from_checkpoint": True}),
        (["--run_name", "a: b: c"], {"run_name": "a: b: c"}),  # no YAML, and none of our business
        (["--run_name", "@me"], {"run_name": "@me"}),
    ],
)
def test_the_command_line_goes_over_the_file(argv, expected):
    values = recipe.take_settings(REAL, argv)
    assert {key: values[key] for key in expected} == expected


def test_the_real_job_is_what_it_says():
    script, args, model = recipe.parse(REAL, [])
    assert (model.model_name_or_path, model.dtype) == ("Qwen/Qwen3.8-27B", "bfloat16")
    assert script.dataset_name == "HuggingFaceH4/ultrachat_200k"
    assert args.tokens_per_batch == 8192
    assert args.chat_template_kwargs == {"enable_thinking": False}
    assert args.report_to == ["wandb"]
    assert args.activation_checkpointing
    assert args.optim == "adamw_torch_fused"
    plugin = args.fsdp_plugin_args
    assert plugin["fsdp_version"] == 2
    assert plugin["transformer_cls_names_to_wrap"] == "Qwen3_5DecoderLayer"
    assert not plugin.get("activation_checkpointing")  # beside the Trainer's own every forward would run three times


@pytest.fixture
def changed(tmp_path):
    def write(source=TINY, **changes):
        values = {**yaml.safe_load(source.read_text()), **changes}
        path = tmp_path / "changed.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
        return path

    return write


def test_a_key_that_does_not_exist_is_named(changed):
    path = changed(learning_rat=1.0)
    with pytest.raises(ConfigurationError, match=r"no setting learning_rat\n.*did you mean learning_rate"):
        recipe.parse(path, ["--config", str(path)])
    with pytest.raises(ConfigurationError, match=r"no setting report\n.*did you mean report_to"):
        recipe.parse(TINY, ["--report", "wandb"])  # argparse would take it, the checks before it have not seen it
    path = changed(save_strategy=False)  # `save_strategy: no`
    with pytest.raises(ConfigurationError, match='write "no" in quotes'):
        recipe.parse(path, ["--config", str(path)])


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "None"), (b"- a", "['a']"), (b"a: [", "expected the node content"), (b"\xff\xfe", "save it as UTF-8")],
    ids=["empty", "a list", "broken", "no text"],
)
def test_a_file_without_settings_is_refused_with_what_it_is(tmp_path, content, said):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="holds no settings") as refused:
        recipe.take_settings(path, [])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seed: 1\nbf16: false\nseed: 2\n", "seed stands twice in .*, in lines 1 and 3"),
        ("fsdp_config:\n  version: 2\n  version: 1\n", "version stands twice in .*, in lines 2 and 3"),
        ("a: [{b: 1, b: 1}]", None),  # in one line
    ],
    ids=["a setting", "inside another", "one line"],
)
def test_a_key_that_stands_twice_is_refused_where_yaml_takes_the_last(tmp_path, content, said):
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=said or "b stands twice"):
        recipe.take_settings(path, [])
    path.write_text("a: {x: 1}\nb: {x: 1}\n")
    assert recipe.take_settings(path, []) == {"a": {"x": 1}, "b": {"x": 1}}


def test_variables_of_the_file_are_set_before_anything_looks_at_them(tmp_path):
    """TRL's parser sets them when wandb's login has been asked for: WANDB_MODE=offline there was refused."""
    path, environment = tmp_path / "job.yaml", {"WANDB_MODE": "online"}
    path.write_text("seed: 1\nenv: {WANDB_MODE: offline, OMP_NUM_THREADS: 4}\n")
    assert recipe.take_settings(path, [], environment)["seed"] == 1
    assert environment == {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "4"}
    path.write_text("env: WANDB_MODE=offline\n")
    with pytest.raises(ConfigurationError, match="env: 'WANDB_MODE=offline' holds no variables"):
        recipe.take_settings(path, [], environment)


@pytest.mark.parametrize(
    "config",
    [["--config", str(TINY)], [f"--config={TINY}"], ["--config", str(REAL), f"--config={TINY}"]],
    ids=["a word", "an equals sign", "twice, the last one counts"],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_config_that_is_named_is_the_one_that_is_parsed(config, first):
    rest = ["--seed", "7", "--use_cpu"]
    argv = config + rest if first else rest + config
    script, args, _ = recipe.parse(recipe.config_file(argv), argv)
    assert (script.tiny_chat, args.seed, args.use_cpu) == (True, 7, True)


def test_help_is_given_without_a_gpu():
    ended = launch("--help", launcher=False, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 0
    assert "--tokens_per_batch" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tokens_per_batch", "abc"], "tokens_per_batch"),
        (["--overlong", "banana"], "overlong"),
        (["--tokens_per_bach", "512"], "did you mean tokens_per_batch"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_named_in_one_message(capsys, argv, named):
    with pytest.raises(ConfigurationError, match=named):
        recipe.parse(TINY, argv)
    assert "usage:" not in capsys.readouterr().err


def test_a_model_or_data_beside_the_tiny_ones_would_not_be_read_and_are_refused(changed, monkeypatch):
    monkeypatch.setattr(recipe, "prepare_process", lambda: pytest.fail("it went on"))
    with pytest.raises(ConfigurationError, match=r"(?s)dataset_name would not be read.*--tiny_chat false --model"):
        recipe.main(["--config", str(changed(dataset_name="me/data"))])


def test_a_job_without_data_is_refused(changed):
    path = changed(tiny_chat=False)
    with pytest.raises(ConfigurationError, match="dataset_name is not set"):
        recipe.parse(path, ["--config", str(path)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name_or_path": None}, "model_name_or_path is not set"),
        ({"model_name_or_path": "/tmp/no/model"}, "model_name_or_path: there is no file or folder"),
        ({"model_name_or_path": str(TINY.parent)}, "is no folder of a model\n  it holds no config.json"),
        ({"model_name_or_path": str(TINY)}, "is no folder of a model\n  it is a file"),
        ({"eval_strategy": "steps"}, "no evaluation set"),
        ({"dataset_name": "no_rows.jsonl"}, "no such file: no_rows.jsonl"),
        ({"dataset_name": "~/no/data"}, f"dataset_name: {Path.home()}/no/data"),
    ],
    ids=["no model", "no folder", "no config", "a file", "no evaluation set", "no rows", "a tilde"],
)
def test_a_model_or_data_that_are_not_there_are_told_before_anything_is_imported(changed, monkeypatch, changes, said):
    monkeypatch.setattr(recipe, "prepare_process", lambda: pytest.fail("it went on"))
    with pytest.raises((ConfigurationError, DatasetError), match=said):
        recipe.main(["--config", str(changed(REAL, **changes))])


def test_without_a_way_to_the_hub_it_stops_before_anything_is_imported(changed, monkeypatch):
    monkeypatch.setattr(recipe, "prepare_process", lambda: pytest.fail("it went on"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("hf_speedkit.trainer.hub_access.why_unreachable", lambda: "no network")
    job = changed(REAL, use_cpu=True, fsdp=False, report_to="none", model_name_or_path="nobody/nothing")
    with pytest.raises(ConfigurationError, match=r"(?s)Hub cannot be reached.*no network.*hf download nobody/nothing"):
        recipe.main(["--config", str(job)])


def test_a_folder_without_a_tokenizer_is_told_with_what_it_should_hold(tmp_path):
    with pytest.raises(ConfigurationError, match=r"(?s)no tokenizer.*a folder with config, weights and tokenizer"):
        load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path)))
    Qwen3Config(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)  # of which transformers makes one
    with pytest.raises(ConfigurationError, match=r"(?s)has no vocabulary.*copy tokenizer.json"):
        load_tokenizer(ModelConfig(model_name_or_path=str(tmp_path)))


def launch(*arguments, launcher=True, launch_config=None, timeout=240, **environment):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"] if launcher else [sys.executable]
    if launch_config is not None:  # port 0: any that is free
        command += ["--config_file", str(ROOT / "accelerate_configs" / launch_config), "--main_process_port", "0"]
    env = {**os.environ, "TQDM_DISABLE": "1", "COLUMNS": "110", **environment}
    return subprocess.run(
        [*command, str(SCRIPT), *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize("launcher", [True, False], ids=["accelerate launch", "python"])
def test_without_a_gpu_the_real_job_stops_in_seconds_with_one_message_last(launcher):
    began = time.monotonic()
    ended = launch(launcher=launcher, CUDA_VISIBLE_DEVICES="")
    assert time.monotonic() - began < 30
    assert ended.returncode == (1 if launcher else 2)
    message = ended.stderr.rstrip().splitlines()[-4:]
    assert "accelerate launch recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml" in message[-1]
    assert "GPU" in ended.stderr.rstrip()[-800:]
    assert "Traceback" not in ended.stderr if not launcher else True


def test_trl_is_not_imported_before_the_hardware_check():
    probe = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    print(stop.code, sorted({'trl', 'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", probe, str(SCRIPT)], capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT, timeout=60,
    )  # fmt: skip
    # sys.argv[1] is the script itself and no option, so its own YAML file is read
    assert ended.stdout.strip() == "2 []"


@pytest.mark.slow
def test_the_tiny_job_learns_and_its_table_says_what_happened(tmp_path):
    out = tmp_path / "run"
    job = ("--config", str(TINY), "--max_steps", "4", "--conversations", "40", "--output_dir", str(out))
    ended = launch(*job, launch_config="cpu.yaml")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "8,192 slots" in ended.stdout  # 4 steps of 1,024 on each of two processes
    for line in ("packing efficiency", "2-D padding", "real tokens / s", "step time", "isolation", "kernels FALLBACK"):
        assert line in ended.stdout
    assert (out / "model.safetensors").exists()
    lines = [json.loads(line) for line in (out / "speedkit_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 5))
    again = ("--config", str(TINY), "--conversations", "40", "--output_dir", str(out))
    assert "already holds a run" in in_a_process(tmp_path, *again, code=2)
    saved = (*again, "--save_strategy", "steps", "--save_steps", "1", "--allow_existing_output")
    in_a_process(tmp_path, *saved, "--max_steps", "1")
    said = in_a_process(tmp_path, *saved, "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert "in 1 step" in said


def in_a_process(path, *arguments, code=0):
    """What the script says in a process that has torch and trl already."""
    said = path / "said"
    with pytest.raises(ProcessExitedException, match=f"exit code {code}") if code else nullcontext():
        start_ranks(run_script, arguments, said, ranks=1)
    return said.read_text()


def run_script(rank, arguments, said):
    from hf_speedkit.trainer import machine

    machine.use_all_cores = lambda args: 1  # the cores of the other tests
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.argv = [str(SCRIPT), *arguments]
        os.environ.update(TQDM_DISABLE="1", COLUMNS="110")
        runpy.run_path(str(SCRIPT), run_name="__main__")
        sys.stdout.flush()


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_dataset(tmp_path, monkeypatch):
    import datasets.config

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a"}) + "\n")
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(file / "datasets"))
    with pytest.raises(DatasetError, match="HF_HOME") as told:
        load_rows(str(rows), "train")
    assert str(file) in str(told.value)
