"""TRL's GRPOTrainer. A second process generates its rollouts, and follows every optimizer step.

python docs/examples/trl_grpo.py FOLDER  # a checkpoint, such as transformers_cpu.py writes
"""

import json
import sys
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from deltasync import WeightReceiver, WeightSender
from deltasync.integrations.transformers import TransformersSource, transformers_target
from deltasync.transports import shared_memory


class Rollouts(TrainerCallback):
    """The second process, as the trainer sees it."""

    def __init__(self, sender: WeightSender, process: Any) -> None:
        self.sender, self.process = sender, process

    def generate(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids, step = trainer.processing_class(prompts)["input_ids"], trainer.state.global_step
        request = {"prompts": ids, "count": trainer.max_completion_length, "seed": step}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return dict(json.loads(self.process.stdout.readline()), prompt_ids=ids)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print("{}", file=self.process.stdin, flush=True)  # asks it to receive
        self.sender.wait_for_receivers(1)
        stats = self.sender.send_weights()  # none at first: both begin with the checkpoint
        print(f"v{stats.version}: {stats.density:.2%} changed, {stats.payload_bytes} bytes")

    on_step_end = on_train_begin

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(int(number) < 500 for number in text.split()) for text in completions]


def train(folder: str, rollouts: type[Rollouts] = Rollouts) -> None:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = Dataset.from_list([{"prompt": f"{n} {n + 1} {n + 2}"} for n in range(3, 900)])
    with TemporaryDirectory() as place, shared_memory.Sender(f"{place}/socket") as link:
        command = [sys.executable, __file__, folder, f"{place}/socket"]
        with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
            engine = rollouts(WeightSender(TransformersSource(policy), link), process)
            short = {"max_steps": 4, "max_completion_length": 16, "learning_rate": 1e-4}
            args = GRPOConfig(place, report_to="none", use_cpu=True, bf16=False, **short)
            ours = {"callbacks": [engine], "rollout_func": engine.generate}
            GRPOTrainer(policy, engine.reward, args, prompts, **ours).train()


def serve(folder: str, path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    receiver = WeightReceiver(transformers_target(model), shared_memory.Receiver(path))
    for request in map(json.loads, sys.stdin):
        if request:
            print(json.dumps(generated(model, **request)), flush=True)
        else:
            receiver.receive_weights()


def generated(model: Any, prompts: list[list[int]], count: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)  # of one length, as what is generated, to keep this short
    length = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": True, "top_k": 0}
    out = model.generate(ids, return_dict_in_generate=True, output_scores=True, **length)
    logps = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    return {"completion_ids": out.sequences[:, ids.shape[1] :].tolist(), "logprobs": logps.tolist()}


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) == 2 else serve(*sys.argv[1:])
