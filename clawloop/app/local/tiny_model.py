"""Writes a small Qwen3 with random weights, which `clawloop up` serves without `--model`.

Architecture, tokenizer and chat template are real; replies are random text of about a hundred tokens. Its
`generation_config.json` has Qwen3's sampling defaults, so that tests notice an engine that applies them. The same seed
gives the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Weights = dict[str, NDArray[np.float32]]

HIDDEN = 128
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 384
CONTEXT_TOKENS = 32768
VOCABULARY = 1024  # upper bound; small text may give fewer merges
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen's pre-tokenizer: contractions, words, single digits, punctuation, line breaks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def ensure_tiny_model(models_folder: Path, seed: int = 0) -> Path:
    """The folder of the tiny model, created if missing, which takes about a second. Safe with concurrent callers.

    Args:
        models_folder: gets a subfolder for the model.
    """
    target = models_folder / ("tiny-random" if seed == 0 else f"tiny-random-{seed}")
    if (target / "config.json").is_file():
        return target
    models_folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=models_folder))
    try:
        write_tiny_model(unfinished, seed)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # else another process has created it
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def write_tiny_model(folder: Path, seed: int) -> None:
    """Write a Hugging Face model into an existing, empty folder."""
    tokenizer = train_tokenizer(_synthetic_text(), VOCABULARY)
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)}
    size = len(vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(ids))
    shutil.copyfile(_TEMPLATE, folder / "chat_template.jinja")
    # Qwen3's own. vLLM applies it by default.
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ends = [ids[END_OF_TURN], ids["<|endoftext|>"]]
    _write_json(folder / "generation_config.json", {**generation, "eos_token_id": ends})
    save_file(_random_weights(seed, size, ids), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _model_config(size, ids))
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def train_tokenizer(
    texts: Iterable[str], size: int, fixed: Sequence[str] = MARKUP_TOKENS, words: str = WORDS
) -> Tokenizer:
    """A tokenizer with byte-level BPE.

    Args:
        size: number of all tokens; small text may give fewer.
        fixed: texts that are one token each.
        words: regular expression of the pieces of text that tokens do not reach beyond.
    """
    tokenizer = Tokenizer(models.BPE())
    # No normalizer: Qwen's NFC would change text in another form, and tests need exact round trips.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(fixed),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Tags are one token each, not special, as in Qwen3, so that parsers find them in decoded text.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in fixed])
    return tokenizer


def _synthetic_text() -> Iterator[str]:
    people = "the user|the assistant|a friend|my colleague|the team|our server|this tool|a small model"
    deeds = "asks for|explains|writes|reads|counts|sorts|compares|answers|translates|remembers|opens|closes"
    things = "a list of numbers|the weather in Paris|a Python function|the last message|some JSON|a file|"
    things += "the calendar for tomorrow|a short summary|an email|the shopping list|a table|the reason"
    ends = ".|, please.|?|, and then stops.| because it helps.| before noon.|! Thank you.|:\n- one\n- two\n"
    for person in people.split("|"):
        for deed in deeds.split("|"):
            for thing in things.split("|"):
                for end in ends.split("|"):
                    yield f"{person} {deed} {thing}{end}"
    yield from ['{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'] * 50
    yield from ["def add(first, second):\n    return first + second\n\nprint(add(1, 2))\n"] * 50


def _random_weights(seed: int, vocabulary: int, ids: dict[str, int]) -> Weights:
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> NDArray[np.float32]:
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        values *= np.float32(scale / inputs**0.5)
        return values

    def norm(width: int) -> NDArray[np.float32]:
        # Not all ones, as in trained models: else swapping norm and rotation would go unnoticed.
        values: NDArray[np.float32] = np.exp(0.3 * random.standard_normal(width, dtype=np.float32))
        return values

    # 2.0 gives logits a standard deviation of about 2: neither a flat nor a peaked distribution.
    embedding = matrix(vocabulary, HIDDEN, 2.0)
    # Small for markup, so that it is rarely sampled; large for the end of a turn, so that replies end.
    for token, token_id in ids.items():
        embedding[token_id] *= np.float32(1.4 if token == END_OF_TURN else 0.05)
    weights: Weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        norms = {
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
            "self_attn.q_norm": HEAD_DIM,
            "self_attn.k_norm": HEAD_DIM,
        }
        for name, (outputs, inputs) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(outputs, inputs)
        for name, width in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = norm(width)
    return weights


def _model_config(vocabulary: int, ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "dtype": "float32",
        "eos_token_id": ids[END_OF_TURN],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def _tokenizer_config(ids: dict[str, int]) -> dict[str, object]:
    return {
        "added_tokens_decoder": {
            str(token_id): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in CONTROL_TOKENS,
            }
            for token, token_id in ids.items()
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": CONTEXT_TOKENS,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
