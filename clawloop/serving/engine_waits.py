"""A plugin of vLLM: on a CPU an engine waits for its worker without taking a core.

vLLM's engine process asks for its worker's answer by `os.sched_yield` in a loop, which takes a whole core while a reply
is written. With Linux 6.18 on two cores other processes that could run stood still for seconds beside it: one stop in
six came so late that the gateway was killed while it recorded. By `time.sleep(0)`, 50 µs each, the loop takes a third
of a core, and a toy model writes 5 to 10 % fewer tokens/s alone; of a larger one a token takes so long that nothing is
lost.

vLLM loads it in each of its processes, by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations


def wait_by_sleeping() -> None:
    """Idempotent. On a GPU, where a token may take a millisecond, everything stays as it is."""
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.USE_SCHED_YIELD = False
