"""A model folder of a published shape with random weights: `python -m benchmarks.write_model FOLDER`.

config.json, generation_config.json, a byte-level tokenizer with as many entries as the vocabulary, and bf16 weights as
safetensors, made on the GPU where there is one. Any server of Hugging Face folders can serve it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.model_shapes import SHAPES, RandomCheckpoint
from runners.models.config import ModelConfig

MAX_SHARD_BYTES = 2 << 30
NUM_SPECIAL = 256
# What our canonical names are called in a llama's checkpoint.
_LAYER_NAMES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "pre_ffn_norm": "post_attention_layernorm",
}


def stored_name(name: str) -> str:
    """`layers.3.q_proj` → `model.layers.3.self_attn.q_proj.weight`."""
    if name == "lm_head":
        return "lm_head.weight"
    if name.startswith("layers."):
        _, layer, own = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[own]}.weight"
    return f"model.{name}.weight"


def write_config(config: ModelConfig, folder: Path) -> None:
    end_ids = [config.vocab_size - NUM_SPECIAL + place for place in (1, 8, 9)]
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": config.vocab_size - NUM_SPECIAL,
        "eos_token_id": end_ids,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.layer_rope_theta[0],
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    generation = {"bos_token_id": settings["bos_token_id"], "eos_token_id": end_ids}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Byte level without merges; made-up words of two to five letters fill the vocabulary, special tokens end it."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = (word for length in range(2, 6) for word in itertools.product(string.ascii_lowercase, repeat=length))
    for word in itertools.islice(words, vocab_size - NUM_SPECIAL - len(vocab)):
        space = "\u0120" if len(vocab) % 3 == 0 else ""
        vocab[space + "".join(word)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special_{index}|>" for index in range(NUM_SPECIAL)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|special_0|>", "eos_token": "<|special_9|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(config: ModelConfig, folder: Path, device: torch.device) -> int:
    """Number of bytes written."""
    checkpoint = RandomCheckpoint(config)
    shards: list[list[str]] = [[]]
    size = 0
    for name in checkpoint.names():
        num_bytes = checkpoint.get(name).nbytes
        if size + num_bytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    placed: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {stored_name(name): checkpoint.get(name).dequantize(torch.bfloat16, device).cpu() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--no-weights", action="store_true", help="config and tokenizer only")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[arguments.shape]
    started = time.perf_counter()
    write_config(config, arguments.folder)
    write_tokenizer(config.vocab_size, arguments.folder)
    if not arguments.no_weights:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        num_bytes = write_weights(config, arguments.folder, device)
        print(f"{num_bytes / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
