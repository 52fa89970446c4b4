"""Names that other libraries give to options, for suggestions: those of docs/coming-from.md."""

from __future__ import annotations

from collections.abc import Collection

_OTHERS = {
    "kind": "trainer_type",
    "rollout": "n_steps num_steps buffer_size",
    "capacity": "buffer_size",
    "minibatch": "batch_size num_minibatches",
    "batch": "batch_size",
    "epochs": "n_epochs num_epoch update_epochs",
    "clip": "clip_range clip_coef epsilon",
    "entropy_coefficient": "ent_coef beta",
    "temperature": "ent_coef",
    "value_coefficient": "vf_coef",
    "gae_lambda": "lambd lambda",
    "gamma": "reward_signals",
    "anneal": "anneal_lr learning_rate_schedule",
    "hidden": "policy_kwargs net_arch network_settings num_layers hidden_units",
    "normalize_observations": "normalize norm_obs",
    "normalize_rewards": "norm_reward",
    "sampler": "sampler_type",
    "min": "min_value",
    "max": "max_value",
    "std": "st_dev",
    "ranges": "intervals",
    "until": "completion_criteria",
    "episodes": "min_lesson_length",
    "manager.env": "env_id env_name",
    "manager.n_envs": "num_envs",
    "training.steps": "total_timesteps max_steps",
    "training.checkpoint_every": "checkpoint_interval",
    "training.keep": "keep_checkpoints",
    "training.metrics": "tb_log_name tensorboard_log track",
    "training.rounds": "self_play",
    "training.parameters": "environment_parameters",
    "trainers.NAME": "hyperparameters",
}
"""Names in other libraries by the name here. A name with a table's name before it is found in that table."""


def other_names(name: str, table: str, options: Collection[str]) -> str | None:
    """Return the end of an error message that says how ``name`` of another library is called here, or None.

    ``table``: the table in which the name was used, whose ``options`` come first.
    """
    here = [own for own, others in _OTHERS.items() if name in others.split()]
    for own in here:
        if own.rpartition(".")[2] in options:
            return f": here it is {table}.{own.rpartition('.')[2]} (docs/coming-from.md)."
    elsewhere = next((own for own in here if "." in own), None)
    return None if elsewhere is None else f": here it is {elsewhere} (docs/coming-from.md)."
