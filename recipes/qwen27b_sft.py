"""Fine-tune Qwen3.8-27B on ultrachat_200k: packed, proven before step 1, measured while it runs.

    accelerate launch recipes/qwen27b_sft.py                                    # the real job: qwen27b_sft.yaml
    accelerate launch recipes/qwen27b_sft.py --config recipes/qwen27b_lora.yaml # adapters, on one 80 GB GPU
    accelerate launch recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml     # the same path in minutes, no GPU

Every setting is in the YAML file, and any of them can be given on the command line (`--learning_rate 1e-5`). For your
own job copy the YAML file; for your own data, model or trainer read `main` from top to bottom: that is all there is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.trainer.adapters import adapter_config, require_adapters
from hf_speedkit.trainer.broken_installs import refusals_told
from hf_speedkit.trainer.hardware import require_hardware
from hf_speedkit.trainer.hub_access import require_hub_for
from hf_speedkit.trainer.installed_versions import require_versions
from hf_speedkit.trainer.job_settings import options, require_named, take_settings, unusable, without_option
from hf_speedkit.trainer.launching import announce_ranks, announce_sharding
from hf_speedkit.trainer.machine import prepare_process, tell_slow_imports, use_all_cores
from hf_speedkit.trainer.trackers import require_trackers

TINY = "accelerate launch recipes/qwen27b_sft.py --config recipes/tiny_sft.yaml"


def main(argv: list[str]) -> None:
    """Data, model, trainer, in that order: a wrong split is told before 54 GB are read."""
    config = config_file(argv)
    # Before any heavy import and any download: a machine that cannot run the job says so in seconds.
    require_versions()
    job = take_settings(config, argv)
    if not {"--help", "-h"} & set(argv):
        require_named(job)
        require_hardware(job, command=TINY)
        require_trackers(job)
        require_adapters(job)
        require_hub_for(job)
        announce_sharding(job)
        announce_ranks()
    prepare_process()
    recipe, args, model_args = parse(config, argv)

    from transformers import AutoModelForCausalLM, set_seed

    from hf_speedkit import SpeedSFTTrainer
    from hf_speedkit.trainer.before_loading import require_before_loading
    from hf_speedkit.trainer.checkpoints.final_model import require_room_at_end
    from hf_speedkit.trainer.data.before_weights import check_rows
    from hf_speedkit.trainer.dataset_source import load_rows
    from hf_speedkit.trainer.output import require_output
    from hf_speedkit.trainer.summary import print_summary
    from hf_speedkit.trainer.weights import load_model, load_tokenizer

    resume = job.get("resume_from_checkpoint")  # a path, true for the last good one in output_dir, or auto
    require_output(args, resume)
    use_all_cores(args)
    if args.process_index == 0:
        tell_slow_imports()
    set_seed(args.seed)

    choice = None
    if recipe.tiny_chat:  # built here, from packages: nothing is downloaded
        import tiny_chat

        tokenizer = tiny_chat.tiny_tokenizer()
        model = AutoModelForCausalLM.from_config(tiny_chat.tiny_config(), attn_implementation="sdpa")
        dataset, choice = tiny_chat.tiny_dataset(tokenizer, args.tokens_per_batch, recipe.conversations)
    else:
        require_before_loading(model_args, args)  # kernels and memory
        tokenizer = load_tokenizer(model_args)
        dataset = load_rows(recipe.dataset_name, recipe.dataset_config, split=recipe.dataset_train_split)
        check_rows([("train", dataset)], args, tokenizer=tokenizer)
        model = load_model(model_args, args, random_weights=recipe.random_weights)  # once, not once per process

    trainer = SpeedSFTTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapter_config(model_args),
    )
    require_room_at_end(trainer)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.stopped_by is None:  # else its last act was a checkpoint, and the machine is about to go
        trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        print_summary(trainer.summary(), notes=() if choice is None else (choice.sentence(),))


@dataclass
class RecipeArguments:
    """What the recipe itself needs to know; everything else is SpeedSFTConfig's and TRL's ModelConfig's."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub id, folder or file (.jsonl, .parquet ...)."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    expected_parameters: float | None = field(
        default=None, metadata={"help": "Parameters of the model, to check memory before anything is downloaded."}
    )
    random_weights: bool = field(default=False, metadata={"help": "Draw the weights: a benchmark needs a config only."})
    hybrid_sharding: bool = field(default=False, metadata={"help": "FSDP2 inside each host, a copy on every host."})
    tiny_chat: bool = field(default=False, metadata={"help": "Use the model and data of recipes/tiny_chat.py."})
    conversations: int = field(default=174, metadata={"help": "How many conversations tiny_chat chooses."})

    def __post_init__(self) -> None:
        """Refuse a job without data."""
        if self.dataset_name is None and not self.tiny_chat:
            raise ConfigurationError("dataset_name is not set", mend="dataset_name: HuggingFaceH4/ultrachat_200k")


def config_file(argv: list[str]) -> Path:
    """The YAML file: what `--config` names, else the one beside this script."""
    given = [part for name, part in options(argv) if name == "config"]
    return Path(given[-1]) if given else Path(__file__).resolve().with_name("qwen27b_sft.yaml")


def parse(config: Path, argv: list[str]) -> tuple[RecipeArguments, Any, Any]:
    """YAML and command line into dataclasses; TrlParser refuses a key that none of them has."""
    from trl import ModelConfig, TrlParser

    from hf_speedkit import SpeedSFTConfig

    kinds = (RecipeArguments, SpeedSFTConfig, ModelConfig)

    def refuse(message: str) -> NoReturn:  # argparse's own way prints 160 lines of usage around one that matters
        raise unusable(message, config.name, known=[setting.name for kind in kinds for setting in fields(kind)])

    parser = TrlParser(kinds)
    parser.error = refuse
    parser.allow_abbrev = False  # what was read before it knows whole names only
    try:
        recipe, args, model_args = parser.parse_args_and_config(
            ["--config", str(config), *without_option(argv, "config")]
        )
    except ValueError as error:
        if isinstance(error, SpeedkitError):
            raise
        refuse(str(error))
    return recipe, args, model_args


if __name__ == "__main__":
    with refusals_told():
        main(sys.argv[1:])
