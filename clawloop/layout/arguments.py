"""Command-line arguments and environment variables of engines and trainer, derived from a layout."""

from __future__ import annotations

from clawloop.layout.engine import UTILIZATION, Serving
from clawloop.layout.parts import Device, Ranks
from clawloop.layout.request import Request

# Bytes; glibc gives what is larger pages of its own, which go back to the machine when it is freed.
_MMAP_FROM = str(2**20)


def engine_arguments(request: Request, serving: Serving, *, gpus: int, with_lora: bool) -> tuple[str, ...]:
    """Arguments of vLLM's `api_server`, without model, address and size of the cache."""
    limits = request.limits
    arguments = ["--dtype", request.dtype, "--max-model-len", str(limits.max_model_len)]
    arguments += ["--max-num-seqs", str(serving.seqs), "--max-num-batched-tokens", str(serving.batched_tokens)]
    if with_lora:
        arguments += ["--enable-lora", "--max-lora-rank", str(limits.max_lora_rank)]
        arguments += ["--max-loras", str(limits.max_loras), "--max-cpu-loras", str(limits.max_cpu_loras)]
    if gpus > 1:
        arguments += ["--tensor-parallel-size", str(gpus)]
    return (*arguments, *request.model.chat.engine_arguments)


def cache_on_shared_gpu(cache: int, engine: int, device: Device) -> tuple[str, ...]:
    """A cache of this size, whatever else the GPU holds.

    vLLM then takes no share of the GPU, but still compares one with what is free at its start
    (`v1.worker.utils.request_memory`), where the trainer may hold all of its own.

    Args:
        engine: bytes of all of the engine.
    """
    share = max(1, 100 * engine // device.bytes) / 100  # rounded down: the next hundredth may be the trainer's
    return *cache_of(cache), "--gpu-memory-utilization", f"{share:.2f}"


def cache_on_own_gpus() -> tuple[str, ...]:
    """Arguments that give the KV cache the rest of vLLM's share, which vLLM measures better than we compute it."""
    return "--gpu-memory-utilization", str(UTILIZATION)


def cache_of(size: int) -> tuple[str, ...]:
    return "--kv-cache-memory-bytes", str(size)


def trainer_arguments(request: Request, gpus: int, ranks: Ranks | None = None) -> tuple[str, ...]:
    """Arguments of `clawloop worker trainer`, without model and adapters."""
    limits = request.limits
    arguments = ["--device", "cuda" if gpus else "cpu", "--dtype", request.dtype]
    arguments += ["--max-tokens", str(limits.max_sample_tokens), "--micro-batch-tokens", str(limits.micro_batch_tokens)]
    if request.quantise is not None:
        arguments += ["--quantise", request.quantise]
    if request.serve_model is not None:
        arguments.append("--engines-quantised")
    return (*arguments, "--nproc", str(max(1, gpus)), *(() if ranks is None else ("--ranks", ranks)))


def engine_environment(gpus: tuple[int, ...]) -> dict[str, str]:
    """
    On a CPU: what gives memory back. vLLM packs each weight for oneDNN and lets the original go, into gaps of glibc's
    heap that no other fits.
    """
    if not gpus:
        return {"MALLOC_MMAP_THRESHOLD_": _MMAP_FROM}
    # CUDA numbers the fastest GPU first by default, nvidia-smi by their bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def trainer_environment(gpus: tuple[int, ...]) -> dict[str, str]:
    """Variables that keep freed memory usable although the tensors of each sample have other sizes."""
    if gpus:
        return engine_environment(gpus) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {
        # Tensors below 32 MiB else come from glibc's heap, in whose gaps the next ones do not fit: a step of Qwen3-0.6B
        # over 1,000 tokens then held 350 to 700 MiB instead of 160.
        "MALLOC_MMAP_THRESHOLD_": _MMAP_FROM,
        # In bfloat16 oneDNN compiles half a MiB for each shape of a product, and keeps 1,024 of them.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }
