"""Decodes with the demo's model in this process, several times as fast as transformers' `generate`.

At this width most of the time of a token is calls, not arithmetic: projections of one input are one product, rows that
have ended leave the batch, and nothing is checked or copied that a model of this size does not need. A test compares
it with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

_HIDDEN = -1e9  # added to the scores of padding and of later tokens


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a layer; each norm's scale is part of the next projection."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_1H1D: Tensor  # of queries and keys


class Decoder:
    """Samples replies with a model's present weights.

    Args:
        model: without further layers or biases than Qwen3's.
        end: the token that ends a reply.
    """

    def __init__(self, model: Qwen3ForCausalLM, end: int):
        self._config: Qwen3Config = model.config
        self._end = end
        self._embedding_VH = model.model.embed_tokens.weight.detach()
        self._logits_VH = self._embedding_VH * model.model.norm.weight.detach()
        self._layers = [_layer(layer, model.config) for layer in model.model.layers]

    @torch.no_grad()
    def replies(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        max_tokens: int,
        drafts: Sequence[Sequence[Sequence[int]]] = (),
    ) -> list[list[int]]:
        """Return the ids of one reply to each prompt, with the end token unless it was cut; 0 is greedy.

        Args:
            drafts: of each prompt, replies that are likely, with their end token. They are read at once instead of
                drawn token by token, and change how fast a reply is drawn, not how often (speculative sampling with
                certain drafts: Leviathan, Kalman and Matias, 2023).
        """
        found: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        while drafts and rows:
            likely = {row: _continuing(drafts[row], found[row], max_tokens) for row in rows}
            drafted = [row for row in rows if likely[row]]
            if not drafted:
                break
            states, logits_BV = self._read([[*prompts[row], *found[row]] for row in drafted], max_tokens)
            firsts = _chosen(logits_BV, temperature).tolist()
            read: list[Sequence[int]] = []
            for row, first in zip(drafted, firsts, strict=True):
                place = len(found[row])
                read.append(next((draft[place:] for draft in likely[row] if draft[place] == first), [first]))
            kept = self._kept(read, states, temperature)
            for row, tokens in zip(drafted, kept, strict=True):
                found[row] = [*found[row], *tokens][:max_tokens]
            rows = [row for row in rows if not self._is_over(found[row], max_tokens)]
        if rows:
            self._draw([prompts[row] for row in rows], [found[row] for row in rows], temperature, max_tokens)
        return found

    @torch.no_grad()
    def logprobs(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """Return the log-probability of each token of each reply."""
        states, logits_BV = self._read(prompts, max(map(len, replies)))
        rows, places, behind_NV = self._behind(replies, states)
        following = [replies[row][place + 1] for row, place in zip(rows, places, strict=True)]
        first_B = (logits_BV / temperature).log_softmax(-1)[range(len(replies)), [reply[0] for reply in replies]]
        values = (behind_NV / temperature).log_softmax(-1)[range(len(rows)), following].tolist()
        found = [[value] for value in first_B.tolist()]
        for row, value in zip(rows, values, strict=True):
            found[row].append(value)
        return found

    @torch.no_grad()
    def next_logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits behind each prompt: [prompts, vocabulary]."""
        return self._read(prompts, 0)[1]

    def _is_over(self, reply: Sequence[int], max_tokens: int) -> bool:
        return len(reply) >= max_tokens or reply[-1:] == [self._end]

    def _read(self, prompts: Sequence[Sequence[int]], more: int) -> tuple[_State, Tensor]:
        """Read prompts; return the state with room for `more` tokens, and the logits behind each prompt."""
        # Several draws from one prompt, as the judge's are: it is read once.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        width = max(map(len, distinct))
        states = _State(self._config, len(distinct), width + more)
        states.hide_padding([width - len(ids) for ids in distinct])
        ids_BL = torch.tensor([[self._end] * (width - len(ids)) + list(ids) for ids in distinct])
        logits_BV = self._logits(self._forward(ids_BL, states)[:, -1])
        if len(distinct) < len(prompts):
            drawn = torch.tensor([distinct.index(tuple(ids)) for ids in prompts])
            states.keep(drawn)
            logits_BV = logits_BV[drawn]
        return states, logits_BV

    def _behind(self, replies: Sequence[Sequence[int]], states: _State) -> tuple[list[int], list[int], Tensor]:
        """Read replies; return row and place of each token but the last ones, and the logits behind it."""
        width = max(map(len, replies))
        ids_BL = torch.tensor([[*reply, *[self._end] * (width - len(reply))] for reply in replies])
        states_BLH = self._forward(ids_BL, states)
        rows = [row for row, reply in enumerate(replies) for _ in reply[1:]]
        places = [place for reply in replies for place in range(len(reply) - 1)]
        return rows, places, self._logits(states_BLH[rows, places])

    def _kept(self, drafts: Sequence[Sequence[int]], states: _State, temperature: float) -> list[list[int]]:
        """For each draft the tokens that drawing token by token would have kept, and then the token it would draw."""
        rows, places, logits_NV = self._behind(drafts, states)
        kept = [[draft[0]] for draft in drafts]
        if not rows:
            return kept
        following = torch.tensor([drafts[row][place + 1] for row, place in zip(rows, places, strict=True)])
        if temperature:
            odds_NV = (logits_NV / temperature).softmax(-1)
            agrees = (torch.rand(len(rows)) < odds_NV[range(len(rows)), following]).tolist()
        else:
            odds_NV = logits_NV
            agrees = (logits_NV.argmax(-1) == following).tolist()
        left = set[int]()
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row in left:
                continue
            if agrees[number]:
                kept[row].append(drafts[row][place + 1])
                continue
            left.add(row)
            if temperature:  # not what was refused: that draw has been made
                odds_V = odds_NV[number].clone()
                odds_V[following[number]] = 0
                kept[row].append(int(torch.multinomial(odds_V, 1)))
            else:
                kept[row].append(int(odds_NV[number].argmax()))
        return kept

    def _draw(
        self, prompts: Sequence[Sequence[int]], found: Sequence[list[int]], temperature: float, max_tokens: int
    ) -> None:
        """Append to each reply found so far, token by token."""
        begun = [[*prompt, *reply] for prompt, reply in zip(prompts, found, strict=True)]
        states, logits_BV = self._read(begun, max_tokens)
        rows = list(range(len(begun)))
        while True:
            chosen = _chosen(logits_BV, temperature)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                found[row].append(token)
            going = [place for place, row in enumerate(rows) if not self._is_over(found[row], max_tokens)]
            if not going:
                return
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                kept = torch.tensor(going)
                states.keep(kept)
                chosen = chosen[kept]
            logits_BV = self._logits(self._forward(chosen[:, None], states)[:, -1])

    def _logits(self, states: Tensor) -> Tensor:
        return F.linear(_normed(states, self._config.rms_norm_eps), self._logits_VH)

    def _forward(self, ids_BT: Tensor, states: _State) -> Tensor:
        """Last states of these tokens, which are appended to the cache: [batch, tokens, hidden]."""
        config, eps = self._config, self._config.rms_norm_eps
        batch, length = ids_BT.shape
        groups = config.num_attention_heads // config.num_key_value_heads
        cos_BT1D, sin_BT1D, mask = states.advance(length)
        x_BTH: Tensor = self._embedding_VH[ids_BT]
        for layer, keys, values in zip(self._layers, states.keys, states.values, strict=True):
            heads = F.linear(_normed(x_BTH, eps), layer.qkv).view(batch, length, -1, config.head_dim)
            queried = heads[:, :, : -config.num_key_value_heads]
            turned = _rotated(_normed(queried, eps) * layer.norm_1H1D, cos_BT1D, sin_BT1D)
            query = turned[:, :, : config.num_attention_heads].transpose(1, 2)
            keys[:, :, states.at - length : states.at] = turned[:, :, config.num_attention_heads :].transpose(1, 2)
            values[:, :, states.at - length : states.at] = heads[:, :, -config.num_key_value_heads :].transpose(1, 2)
            # The heads of a group stand below one another, so that their keys are read once.
            grouped = query.reshape(batch, config.num_key_value_heads, groups * length, config.head_dim)
            scores = grouped @ keys[:, :, : states.at].transpose(2, 3) * config.head_dim**-0.5
            weights = (scores.view(batch, -1, groups, length, states.at) + mask).softmax(-1)
            attended = weights.view(scores.shape) @ values[:, :, : states.at]
            joined = attended.view(batch, -1, length, config.head_dim).transpose(1, 2).reshape(batch, length, -1)
            x_BTH = x_BTH + F.linear(joined, layer.out)
            gate, up = F.linear(_normed(x_BTH, eps), layer.gate_up).chunk(2, -1)
            x_BTH = x_BTH + F.linear(F.silu(gate) * up, layer.down)
        return x_BTH


class _State:
    """The cached keys and values of a batch, which begin with padding where prompts are shorter."""

    def __init__(self, config: Qwen3Config, batch: int, most: int):
        shape = (batch, config.num_key_value_heads, most, config.head_dim)
        self.keys = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.at = 0
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._speeds = config.rope_parameters["rope_theta"] ** -half
        self._hidden_BL = torch.zeros(batch, most)
        self._padded_B1 = torch.zeros(batch, 1)

    def hide_padding(self, padded: Sequence[int]) -> None:
        """Hide that many first places of each row."""
        self._padded_B1 = torch.tensor(padded, dtype=torch.float32)[:, None]
        self._hidden_BL = torch.where(torch.arange(self._hidden_BL.shape[1]) < self._padded_B1, _HIDDEN, 0.0)

    def advance(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make room for `length` tokens; return their cosines and sines, and what is added to their scores."""
        before, self.at = self.at, self.at + length
        positions_BT = torch.arange(before, self.at) - self._padded_B1
        angles = (positions_BT[:, :, None] * self._speeds)[:, :, None]
        hidden = self._hidden_BL[:, None, None, None, : self.at]
        if length > 1:
            places = torch.arange(self.at)
            hidden = hidden + torch.where(places > torch.arange(before, self.at)[:, None], _HIDDEN, 0.0)
        return angles.cos(), angles.sin(), hidden

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, in their order; one may come several times."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self._hidden_BL, self._padded_B1 = self._hidden_BL[rows], self._padded_B1[rows]


def _layer(layer: Any, config: Qwen3Config) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    joint = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    norms = [attention.q_norm.weight] * config.num_attention_heads
    norms += [attention.k_norm.weight] * config.num_key_value_heads
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    return _Layer(
        (joint * layer.input_layernorm.weight).detach(),
        attention.o_proj.weight.detach(),
        (gate_up * layer.post_attention_layernorm.weight).detach(),
        mlp.down_proj.weight.detach(),
        torch.stack(norms).detach(),
    )


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _continuing(drafts: Sequence[Sequence[int]], reply: Sequence[int], max_tokens: int) -> list[Sequence[int]]:
    """The drafts that begin with this reply and go on, cut at `max_tokens`."""
    cut = (draft[:max_tokens] for draft in drafts)
    return [draft for draft in cut if len(draft) > len(reply) and list(draft[: len(reply)]) == list(reply)]


def _chosen(logits_BV: Tensor, temperature: float) -> Tensor:
    if not temperature:
        return logits_BV.argmax(-1)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1)[:, 0]
