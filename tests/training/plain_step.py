"""A step written out over PEFT and transformers: every logit, one sample at a time, plain autograd."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn

from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Train
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, write_version
from clawloop.training.model.decoder import TorchtuneModel
from clawloop.training.model.port import adapter_tensors
from tests.training.tiny import reference_model


def peft_model(model: TorchtuneModel, base: Path, tmp_path: Path) -> nn.Module:
    identity = BaseIdentity(name="tiny", fingerprint="")
    files = adapter_files(Adapter(model.lora, adapter_tensors(model), identity))
    written = write_version(tmp_path, 1, files)
    peft: nn.Module = PeftModel.from_pretrained(reference_model(base), str(written.path), is_trainable=True)
    return peft.eval()


def plain_logprobs(peft: nn.Module, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Every logit of one unpacked sample, as [response, vocabulary]."""
    logits: Tensor = peft(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def trained_tokens(sample: BatchSample) -> int:
    return sum(sample.response_mask or [True] * len(sample.response_ids))


def sequence_of(sample: BatchSample) -> object:
    """An episode is one sequence, and so is each turn of a chat."""
    return sample.episode or sample.sample_id


def plain_gradients(peft: nn.Module, samples: list[BatchSample], recipe: Train) -> tuple[dict[str, Tensor], float]:
    """The same step written out: one sample at a time, PPO clip and weighted k2."""
    total = sum(trained_tokens(sample) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        arguments = (list(sample.prompt_ids), list(sample.response_ids), sample.temperature)
        chosen = torch.tensor(sample.response_ids)[:, None]
        mask = torch.tensor(sample.response_mask or [True] * len(sample.response_ids))
        logp = plain_logprobs(peft, *arguments).gather(-1, chosen)[:, 0][mask]
        mu = torch.tensor(sample.logprobs)[mask]
        advantage = torch.full_like(mu, sample.reward or 0.0)
        with torch.no_grad():
            with peft.disable_adapter():  # type: ignore[operator]
                base = plain_logprobs(peft, *arguments).gather(-1, chosen)[:, 0][mask]
            if sample.hinted_prompts:
                hinted = (list(sample.hinted_prompts[0]), list(sample.response_ids), sample.temperature)
                asked_base = recipe.advantage.teacher == "base"
                with peft.disable_adapter() if asked_base else nullcontext():  # type: ignore[operator]
                    taught = plain_logprobs(peft, *hinted).gather(-1, chosen)[:, 0][mask]
                # The step's parent answered.
                advantage = advantage + (taught - logp.detach()).clamp(-2, 2)
        rho = (logp - mu).exp()
        objective = torch.minimum(rho * advantage, rho.clamp(0.8, 1.28) * advantage)
        objective = torch.where(advantage < 0, torch.maximum(objective, 3 * advantage), objective)
        per_token = -objective + recipe.loss.kl * rho.clamp(0, 2).detach() * (logp - base).square() / 2
        if recipe.loss.aggregation == "token":
            loss = loss + per_token.sum() / total
        else:
            own = sequence_of(sample)
            tokens = sum(trained_tokens(other) for other in samples if sequence_of(other) == own)
            loss = loss + per_token.sum() / tokens / len({sequence_of(other) for other in samples})
    loss.backward()  # type: ignore[no-untyped-call]
    named = dict(peft.named_parameters())
    found = {name.replace(".default", ""): p.grad for name, p in named.items() if p.grad is not None}
    return found, float(loss.detach())
