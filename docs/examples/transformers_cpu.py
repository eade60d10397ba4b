"""A transformers model that is trained here, and one in a second process that follows it.

python docs/examples/transformers_cpu.py FOLDER

FOLDER is written: a small checkpoint with random weights, which both begin with, and which
engines can be started on. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from deltasync import WeightReceiver, WeightSender, sync_after_step
from deltasync.errors import PeerLost
from deltasync.integrations.transformers import TransformersSource, transformers_target
from deltasync.transports import shared_memory

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    eos_token_id=2,
    pad_token_id=0,
)
STEPS = 5


def train(folder: str) -> None:
    write_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/weights.sock"
        link = shared_memory.Sender(path)
        command = [sys.executable, __file__, folder, path]
        rollout = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with WeightSender(TransformersSource(model), link) as sender:
            sender.wait_for_receivers(1)
            sender.send_weights()  # it joins by digest: both hold the checkpoint
            hook = sync_after_step(optimizer, sender, on_error="raise")
            for _ in range(STEPS):
                tokens = torch.randint(CONFIG.vocab_size, (8, 64))
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()  # ... and the second process has it
                optimizer.zero_grad()
                print(hook.last_stats and summary(hook.last_stats))
        there, _ = rollout.communicate(timeout=60)
    here = sha256(model)
    print(f"trainer as bf16  {here}\nsecond process   {there.strip()}")
    sys.exit(here != there.strip())


def follow(folder: str, path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    receiver = WeightReceiver(transformers_target(model), shared_memory.Receiver(path))
    with receiver, suppress(PeerLost):  # until the trainer has left
        while True:
            receiver.receive_weights()
    print(sha256(model))


def summary(stats: Any) -> str:
    return (
        f"v{stats.version}: {stats.density:.2%} changed, {stats.payload_bytes:,} bytes sent of "
        f"{stats.dense_bytes:,}"
    )


def write_model(folder: str) -> None:
    """A checkpoint, and a tokenizer that knows numbers."""
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(folder)
    words = {str(number): number for number in range(CONFIG.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="2").save_pretrained(folder)


def sha256(model: torch.nn.Module) -> str:
    """Of all weights as bf16, by name: taken beside the library."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.bfloat16().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) == 2 else follow(*sys.argv[1:])
