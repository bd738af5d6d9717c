"""Sampled env steps a second and return of RLlib's IMPALA, for throughput_explorers.py.

    python benchmarks/rllib_rate.py 60

Runs in an environment of its own: pip install 'ray[rllib]' torch. CartPole-v1 with two env runners
of 8 environments, network and batch as in algos/impala.py: two layers of 64 units with tanh for the
policy and two for the value, 20 steps of 8 environments a batch. The rest is RLlib's default.
"""

import json
import logging
import os
import sys
import tempfile
import time

WARM_UP = 10.0  # seconds, in which the workers start


def main(seconds: float) -> None:
    """Train, and print rate and return."""
    os.environ["RAY_AUTH_TOKEN"] = "0" * 64  # else Ray writes one into the home folder
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    with tempfile.TemporaryDirectory(prefix="rllib-", ignore_cleanup_errors=True) as folder:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        # More than there are: RLlib waits for ever where one of its actors finds no free core.
        ray.init(address="local", num_cpus=8, include_dashboard=False, _temp_dir=folder, **quiet)
        model = DefaultModelConfig(
            fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
        )
        config = (
            IMPALAConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=20)
            .training(train_batch_size_per_learner=160)
            .rl_module(model_config=model)
        )
        algorithm = config.build_algo()
        print(json.dumps(measure(algorithm, seconds)))
        algorithm.stop()
        ray.shutdown()


def measure(algorithm: object, seconds: float) -> dict[str, float]:
    """Return env steps a second behind the warm-up, all steps, and the last mean return."""
    start, first = time.perf_counter(), None
    while True:
        result = algorithm.train()
        now, steps = time.perf_counter(), result["num_env_steps_sampled_lifetime"]
        if first is None and now - start > WARM_UP:
            first = now, steps
        if first and now - first[0] > seconds:
            rate = (steps - first[1]) / (now - first[0])
            mean = result["env_runners"]["episode_return_mean"]
            return {"SPS": rate, "steps": steps, "return": mean}


if __name__ == "__main__":
    main(float(sys.argv[1]))
