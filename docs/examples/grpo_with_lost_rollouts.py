"""Train with TRL's GRPOTrainer while sandboxes die, and check that no lost rollout counts.

Run it with ``pip install envmanager trl``. It takes a minute, and downloads nothing: the model has one layer, and what
it "says" is scripted, so that only the tools, the rewards and the advantages are at work. The rollouts have two reward
functions: that of the environment, and one of the format, wrapped in ``unless_lost``. With ``--bare`` it is not.
``--kit`` gives TRL's own lines, which turn rewards into advantages, to ``check_lost_rollouts``.
"""

import argparse
import inspect
import random
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd

from envmanager import AsyncioEnvManager, RestartPolicy
from envmanager.interop.trl import ToolEnvironment, supervised, unless_lost
from envmanager.testing import check_lost_rollouts

N_GENERATIONS = 8
CHANCE = random.Random(0)


class Sandbox:
    def reset(self, **row):
        self.n_solved = 0

    def run(self, code: str) -> str:
        """Run code.

        Args:
            code: The code to run.
        """
        if code == "die":
            raise ConnectionError("the sandbox has ended")
        self.n_solved += int(code)
        return f"solved {self.n_solved}"

    def get_reward(self) -> float:
        return float(self.n_solved)


def format_reward(completions, **row):  # noqa: ARG001
    return [0.25 * len(completion) for completion in completions]


class Scripted(GRPOTrainer):
    """A trainer whose model says what a script says: a call of the tool, then a word."""

    def __init__(self, *args, **options):
        self.checked = self.n_lost = 0
        self.worst = 0.0
        super().__init__(*args, **options)

    def _generate_single_turn(self, prompt_ids, *args, **options):
        says = []
        for ids in prompt_ids:
            text = "done<|im_end|>"
            if "<tool_response>" not in self._tokenizer.decode(ids):
                code = "die" if CHANCE.random() < 0.1 else CHANCE.randrange(5)
                call = f'{{"name": "run", "arguments": {{"code": "{code}"}}}}'
                text = f"<tool_call>\n{call}\n</tool_call><|im_end|>"
            says.append(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return says, None

    def _calculate_rewards(self, *args, **options):
        self.rewards = super()._calculate_rewards(*args, **options)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        is_lost = torch.tensor([env.get_reward() is None for env in self.environments])
        for start in range(0, len(inputs), N_GENERATIONS):
            group = slice(start, start + N_GENERATIONS)
            lost = is_lost[group]
            rewards = self.rewards[group][~lost].sum(dim=1)
            wanted = torch.zeros(N_GENERATIONS)
            wanted[~lost] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            self.worst = max(self.worst, float((outputs["advantages"][group] - wanted).abs().max()))
            self.checked, self.n_lost = self.checked + 1, self.n_lost + int(lost.sum())
        return outputs


def tokenizer():
    """Return a tokenizer of bytes, with Qwen's template for tools."""
    words = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    made.add_special_tokens(special)
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    template = Path(find_spec("trl").origin).parent / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template.read_text()
    )


def verdicts():
    """Print what the kit says of TRL's lines: with None for a lost rollout in all functions, in one, and in none."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    first, last = source.index("        unscorable_mask ="), source.index("        # Slice to keep only the local part")
    lines = compile(textwrap.dedent(source[first:last]), "grpo_trainer.py", "exec")

    def trainer(n_masked):
        def advantages(rewards, lost):
            rewards[lost, :n_masked] = np.nan  # what TRL makes of None
            n_functions = rewards.shape[-1]
            options = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group"}
            it = SimpleNamespace(reward_weights=torch.ones(n_functions), reward_funcs=[None] * n_functions, **options)
            names = {"rewards_per_func": torch.tensor(rewards).reshape(-1, n_functions), "device": "cpu", "self": it}
            names |= {"torch": torch, "nanstd": nanstd, "num_generations": rewards.shape[1]}
            exec(lines, names)
            return names["advantages"].numpy().reshape(rewards.shape[:2])

        return advantages

    for n_masked, what in ((2, "None of all functions"), (1, "None of one of two"), (0, "rewards of a broken text")):
        print(f"{what}: TRL {check_lost_rollouts(trainer(n_masked))}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kit", action="store_true")
    options = parser.parse_args()
    if options.kit:
        verdicts()
        return
    words = tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), **sizes, **heads, eos_token_id=words.eos_token_id))
    rows = [{"prompt": [{"role": "user", "content": f"Solve {i}."}]} for i in range(64)]
    restarts = RestartPolicy(max_restarts=10_000, within_s=3600, on_exception="restart", backoff_s=0)
    with (
        AsyncioEnvManager(lambda: ToolEnvironment(Sandbox()), n_envs=4 * N_GENERATIONS, restarts=restarts) as manager,
        tempfile.TemporaryDirectory() as folder,
    ):
        trainer = Scripted(
            model=model,
            processing_class=words,
            train_dataset=Dataset.from_list(rows),
            environment_factory=supervised(Sandbox, manager.pool()),
            reward_funcs=[format_reward if options.bare else unless_lost(format_reward)],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=options.steps,
                num_generations=N_GENERATIONS,
                per_device_train_batch_size=4 * N_GENERATIONS,
                max_completion_length=512,
                report_to=[],
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    print(f"{trainer.n_lost} rollouts lost in {trainer.checked} groups;", end=" ")
    print(f"the advantages differ from those without the lost ones by up to {trainer.worst:.1e}")


if __name__ == "__main__":
    main()
