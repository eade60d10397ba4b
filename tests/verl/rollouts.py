"""verl's own manager, and vLLM servers as verl starts them, on a CPU that Ray takes for GPUs."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

ROOT = Path(__file__).parents[2]
_PLUGINS = (ROOT / "tests/engines/plugin", ROOT / "tests/verl/plugin")
_ENVIRONMENT = {
    "PYTHONPATH": ":".join(map(str, (ROOT, *_PLUGINS))),
    "VLLM_PLUGINS": "deltasync,without_tiles,without_packing",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `weights_of` alone
    "VLLM_SERVER_DEV_MODE": "1",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "OMP_NUM_THREADS": "1",
}


def hook() -> Callable[[], None]:
    """What Ray's workers begin with."""
    folder = str(ROOT / "tests")

    def find_our_tests() -> None:
        """verl installs a package that is called `tests` too, which workers would find first."""
        import sys
        from types import ModuleType

        sys.modules["tests"] = ModuleType("tests")
        sys.modules["tests"].__path__ = [folder]

    return find_our_tests


@contextmanager
def cluster(gpus: int) -> Iterator[None]:
    """Ray with GPUs that are not there, in an environment in which vLLM runs on a CPU."""
    before, path = dict(os.environ), list(sys.path)
    os.environ.update(_ENVIRONMENT)
    sys.path[:0] = _ENVIRONMENT["PYTHONPATH"].split(":")
    ray.init(
        num_cpus=16,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": hook()},
    )
    try:
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path


def save_model(folder: Path) -> None:
    """A Llama and a tokenizer of as many words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(512)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    )
    tokenizer.save_pretrained(folder)


def configured() -> CheckpointEngineConfig:
    """A checkpoint engine of ours, by which vLLM's workers write in place."""
    return CheckpointEngineConfig(
        backend="deltasync",
        custom_backend_module="deltasync.integrations.verl",
        update_weights_bucket_megabytes=256,
        engine_kwargs={
            "deltasync": {
                "in_place": True,
                "timeout_s": 120,
                "sender": {"wire_dtypes": {"*": "bfloat16"}},
            }
        },
    )


def replica_of(
    number: int,
    folder: Path,
    config: CheckpointEngineConfig,
    *,
    tensor_parallel: int = 1,
    backend: str | None = "deltasync",
) -> Any:
    """verl's own vLLM replica, which does not serve yet."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    rollout = RolloutConfig(
        name="vllm",
        checkpoint_engine=config,
        tensor_model_parallel_size=tensor_parallel,
        load_format="auto",
        max_model_len=128,
        prompt_length=64,
        response_length=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enforce_eager=True,
        free_cache_engine=False,
        enable_sleep_mode=False,
        n_gpus_per_node=tensor_parallel,
        nnodes=1,
        engine_kwargs={"vllm": {"weight_transfer_config": {"backend": backend}} if backend else {}},
    )
    model = HFModelConfig(path=str(folder))
    return vLLMReplica(number, rollout, model, gpus_per_node=tensor_parallel)


def start(*replicas: Any) -> None:
    """Until all of them serve."""

    async def all_of_them() -> None:
        await asyncio.gather(*(replica.init_standalone() for replica in replicas))

    asyncio.run(all_of_them())


def tokens(replica: Any, name: str) -> tuple[list[int], object]:
    """What it generates, and the step that it says it is of."""
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    answer = ray.get(replica.servers[0].generate.remote([5, 6, 7], sampling, name))
    return list(answer.token_ids), answer.extra_fields["global_steps"]


def weights_of(replica: Any) -> list[dict[str, Tensor]]:
    """What each of its workers computes with. verl's server passes on no answers, but calls."""

    def save(worker: Any, folder: str) -> None:
        import torch

        state = worker.model_runner.model.state_dict()
        torch.save({n: t.clone() for n, t in state.items()}, f"{folder}/{worker.rank}.pt")

    with tempfile.TemporaryDirectory() as folder:
        ray.get(replica.servers[0].collective_rpc.remote(save, args=(folder,)))
        files = sorted(Path(folder).iterdir())
        return [torch.load(file) for file in files]


def loaded(weights: Mapping[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """What vLLM makes of a Llama's checkpoint on one rank."""
    own: dict[str, list[Tensor]] = {}
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    for name, tensor in weights.items():
        *stem, kind, last = name.split(".")
        part = kind.removesuffix("_proj")
        if tensor.dim() == 2:
            tensor = tensor.chunk(world, dim=1 if part in ("o", "down") else 0)[rank]
        if part in fused:
            kind = f"{fused[part]}_proj"
        own.setdefault(".".join((*stem, kind, last)), []).append(tensor)
    return {name: torch.cat(parts) for name, parts in own.items()}


def assert_holds(replica: Any, weights: Mapping[str, Tensor]) -> None:
    """Each of its workers computes with these, bit for bit."""
    found = weights_of(replica)
    assert len(found) == replica.world_size
    for rank, state in enumerate(found):
        wanted = loaded(weights, rank, len(found))
        assert wanted.keys() <= state.keys()
        for name, tensor in wanted.items():
            assert torch.equal(state[name].view(torch.int16), tensor.view(torch.int16)), name


def trainer_of(folder: Path, config: CheckpointEngineConfig) -> Any:
    """verl's FSDP2 trainer of the model."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from tests.verl.actors import TrainerWorker

    made = RayClassWithInitArgs(cls=ray.remote(TrainerWorker), config=config, folder=str(folder))
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
