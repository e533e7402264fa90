"""vLLM finds the plugin that its processes need on a CPU, and computes as the plugin says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawloop.app.local.tiny_model import ensure_tiny_model

# As vLLM's engine and worker processes do when they start; then as a reader that has just read a message.
WAITS = """
import os, time
from vllm.plugins import load_general_plugins
load_general_plugins()
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_open_zmq_ipc_path
def refused(*_):
    raise SystemExit("it looks in a loop")
os.sched_yield = refused
shm_broadcast.sched_yield()
address, context = get_open_zmq_ipc_path(), zmq.Context()
writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
reader = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
time.sleep = refused
reader.record_read()
began = time.monotonic()
for timeout_ms in (30, 30, 60_000, None):
    reader.wait(timeout_ms)
assert time.monotonic() - began < 30, "it looks again before long"
reader.last_read -= 2
reader.wait(30)
while not reader.poller.poll(100):
    writer.notify()
reader.wait(None)
assert not reader.poller.poll(0), "the announcement is read"
print("it waits")
"""

# As an API server that forks an engine's process, and as one of these that forks a worker with core 0 for its own.
FORKS = """
import ctypes, os, signal, socket, sys
from importlib.machinery import ModuleSpec
from vllm.plugins import load_general_plugins
sys.modules["__main__"].__spec__ = ModuleSpec("vllm.entrypoints.openai.api_server", None)
load_general_plugins()
import torch
from vllm.utils.ompmultiprocessing import OMPProcessManager
port, (ours, theirs), (reader, writer) = socket.create_server(("127.0.0.1", 0)), socket.socketpair(), os.pipe()
theirs.setblocking(False)
signal.set_wakeup_fd(theirs.fileno())
assert torch.get_num_threads() == 1, "a pool of threads would not live through the fork"
everywhere = os.sched_getaffinity(0)
core = min(everywhere)
manager = OMPProcessManager.__new__(OMPProcessManager)
manager.skip_setup, manager.cpu_lists, manager.use_iomp, manager.use_gomp = False, [[core]], False, False
opened = len(os.listdir("/proc/self/fd"))
def child(is_worker):
    assert os.path.samestat(os.fstat(port.fileno()), os.stat(os.devnull))
    ours.getpeername()  # of this machine alone
    assert len(os.listdir("/proc/self/fd")) == opened, "a copy of a pipe would hide that its writer has ended"
    assert os.sched_getaffinity(0) == ({core} if is_worker else everywhere)
    assert signal.set_wakeup_fd(-1) == -1
    ends_with_parent = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(ends_with_parent), 0, 0, 0)
    assert ends_with_parent.value == (signal.SIGKILL if is_worker else 0)
def forked(is_worker):
    pid = os.fork()
    if not pid:
        try:
            child(is_worker)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
forked(is_worker=False)
with manager.configure_omp_envs(rank=0, local_rank=0):
    forked(is_worker=True)
port.getsockname()
print("it forks")
"""

# Two slots with an adapter each; tokens of the first, of the base model (-1), of the second, of the base model.
ADAPTS = """
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
torch.manual_seed(0)
sizes, rank, width, ids = (6, 4), 3, 5, (7, 7, 0, 8, 0, 0)
a = tuple(torch.randn(2, 1, rank, width) for _ in sizes)
b = tuple(torch.randn(2, 1, size, rank) for size in sizes)
wrapper = PunicaWrapperCPU(16, 16, "cpu")
for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
    for asked in (ids, (0, 0, 0, 0, 0, 0)):
        x, y = torch.randn(len(ids), width).to(dtype), torch.randn(len(ids), sum(sizes)).to(dtype)
        wanted = y.double()
        for token, adapter in enumerate(asked):
            if adapter:
                slot = (7, 8).index(adapter)
                low = [each[slot, 0].double() @ x[token].double() for each in a]
                wanted[token] += torch.cat([2.0 * each[slot, 0].double() @ of for each, of in zip(b, low)])
        wrapper.update_metadata(LoRAMapping(asked, asked, is_prefill=True), [7, 8], 2, 100)
        wrapper.add_lora_linear(y, x, a, b, 2.0, sizes)
        assert torch.allclose(y.double(), wanted, atol=near, rtol=near), (dtype, asked, y, wanted)
print("each token has its own")
"""

# vLLM's own scheduler, with the questions of judges that take up all of a step, and then two chats.
READS = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from concurrent.futures import Future
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
blocks, size = 4000, 16
model = ModelConfig(model=sys.argv[1], dtype="float32")
cache = CacheConfig(block_size=size, enable_prefix_caching=False)
cache.num_gpu_blocks = blocks
seqs = SchedulerConfig(
    max_model_len=model.max_model_len, is_encoder_decoder=False, enable_chunked_prefill=True, max_num_seqs=64,
    max_num_batched_tokens=256, long_prefill_token_threshold=64, policy="priority", async_scheduling=False)
config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=seqs)
layers = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
planner = Scheduler(
    config, KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layers)]), StructuredOutputManager(config), size)
def ask(name, tokens, place, grammar=None):
    form = None if grammar is None else StructuredOutputsParams(choice=["yes", "no"])
    sampling = SamplingParams(max_tokens=9, structured_outputs=form)
    request = Request(name, [1] * tokens, sampling, None, arrival_time=0.0, priority=place)
    if grammar is not None:
        request.structured_output_request.grammar = grammar
    planner.add_request(request)
def read():
    return planner.schedule().num_scheduled_tokens
compiled, compiling = object(), Future()
ask("judge without a grammar yet", 600, 117, compiling)
for number in range(4):
    ask(f"judge {number}", 600, 121, compiled)
for probe in ("probe", "another"):
    ask(probe, 30, 119)
assert read() == {"probe": 30, "another": 30}, "those that fit together"
assert read() == {"judge 0": 256}, "one after another, as nobody chats"
ask("chat", 100, 104)
ask("long chat", 150, 106)
assert read() == {"judge 0": 64, "chat": 64, "long chat": 64}, "all begin"
assert read() == {"chat": 36, "long chat": 64}, "chats are read first"
assert read() == {"long chat": 22}, "no reply here: nothing was sampled"
compiling.set_result(compiled)
steps = [read() for _ in range(5)]
assert steps == [{"judge 0": 64}] * 4 + [{"judge 0": 24}], "a piece beside chats"
assert read() == {"judge without a grammar yet": 64}, "it precedes those that have not begun"
print("chats are read first")
"""


def _run(program: str, *arguments: str) -> str:
    # As in an installation: the entry point is found by the distribution's metadata.
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_forked_worker_has_its_cores_and_not_the_port() -> None:
    assert _run(FORKS) == "it forks"


@pytest.mark.slow
def test_an_engine_does_not_look_for_messages_in_a_loop() -> None:
    assert _run(WAITS) == "it waits"


@pytest.mark.slow
def test_chats_begin_and_are_read_before_judges_whose_prompts_take_up_all_steps(tmp_path: Path) -> None:
    assert _run(READS, str(ensure_tiny_model(tmp_path))) == "chats are read first"


@pytest.mark.slow
def test_tokens_of_one_batch_get_the_adapter_they_asked_for_or_none() -> None:
    assert _run(ADAPTS) == "each token has its own"
