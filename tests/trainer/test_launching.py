"""What is told to accelerate through the environment, for launchers that do not."""

import pytest

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.launching import announce_sharding

JOB = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
TWO_HOSTS = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def announced(job, environment):
    before = dict(environment)
    announce_sharding(job, environment)
    return {key: value for key, value in environment.items() if before.get(key) != value}


def test_a_sharded_job_says_so_before_the_process_group_stands():
    said = announced(JOB, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert said == {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("job", "environment"),
    [
        (JOB, {}),  # one process
        ({**JOB, "fsdp": "false"}, TWO_HOSTS),  # as the command line gives it
        ({**JOB, "use_cpu": True}, TWO_HOSTS),
        ({}, TWO_HOSTS),
    ],
)
def test_nothing_is_said_for_a_job_that_is_not_sharded(job, environment):
    assert announced(job, dict(environment)) == {}


def test_what_the_launcher_said_is_kept():
    launcher = {**TWO_HOSTS, "ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
                "FSDP_VERSION": "2", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4"}  # fmt: skip
    assert announced({**JOB, "hybrid_sharding": True}, launcher) == {}


def test_hybrid_sharding_puts_one_copy_on_every_host():
    said = announced({**JOB, "hybrid_sharding": True}, dict(TWO_HOSTS))
    assert said["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (said["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], said["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == ("2", "8")


def test_hybrid_sharding_needs_something_to_shard():
    with pytest.raises(ConfigurationError, match="hybrid_sharding without fsdp"):
        announce_sharding({"hybrid_sharding": True}, dict(TWO_HOSTS))


def test_hosts_of_different_size_are_refused():
    with pytest.raises(ConfigurationError, match="the hosts differ in size"):
        announce_sharding({**JOB, "hybrid_sharding": True}, {"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"})
