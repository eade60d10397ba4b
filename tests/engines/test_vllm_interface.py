"""What is noted of the vLLM that is installed is what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient

from deltasync.errors import ConfigError
from deltasync.integrations.vllm import VllmServer
from tests.integrations.vllm_interface import facts_of, noted


def test_the_installed_version_is_noted_as_it_is() -> None:
    assert facts_of(Path(vllm.__file__).parents[1]) == noted()[vllm.__version__]


@pytest.mark.parametrize("client", [HTTPVLLMWeightSyncClient(""), RayVLLMWeightSyncClient([])])
def test_its_own_clients_are_taken_where_caches_are_kept(client: Any) -> None:
    with pytest.raises(ConfigError, match=r"WeightSyncClient has no clear_cache.*caches=.keep."):
        VllmServer(client)
    VllmServer(client, caches="keep")
