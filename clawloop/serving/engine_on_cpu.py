"""A plugin of vLLM: on a CPU an engine waits for its worker without taking a core, and takes `seed` in long prompts.

vLLM loads it in each of its processes, by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations


def adapt() -> None:
    """Idempotent. On a GPU everything stays as it is."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _wait_by_sleeping()
        _rewind_generators()


def _wait_by_sleeping() -> None:
    """Wait by `time.sleep(0)`, 50 µs each, in place of `os.sched_yield` in a loop.

    That loop takes a whole core while a reply is written. With Linux 6.18 on two cores other processes that could run
    stood still for seconds beside it: one stop in six came so late that the gateway was killed while it recorded. By
    sleeping the loop takes a third of a core, and a toy model writes 5 to 10 % fewer tokens/s alone; of a larger one a
    token takes so long that nothing is lost. On a GPU a token may take a millisecond.
    """
    from vllm.distributed import utils

    utils.USE_SCHED_YIELD = False


def _rewind_generators() -> None:
    """Let the generator of a request with `seed` be put back after a piece of its prompt.

    vLLM (0.32) samples a token behind each piece of a prompt, throws it away, and sets the generator's offset back by
    what was drawn. Generators of a CPU have no offset, so the engine ended with "CPU Generator does not use offset".
    They begin anew here: before a prompt was read to its end nothing else was drawn. Of a request that is put off in
    its reply and read again, the next tokens are drawn from the beginning of its random numbers.
    """
    import torch

    class Rewinding(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            return self.manual_seed(self.initial_seed())

    if torch.Generator.__name__ != Rewinding.__name__:
        torch.Generator = Rewinding  # type: ignore[misc]
