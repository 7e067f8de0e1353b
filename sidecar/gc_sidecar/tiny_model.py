"""Make a tiny Llama model on the spot: a config and a byte-level BPE tokenizer, for random weights.

Run with the engine's interpreter (`VLLM_PYTHON -I tiny_model.py DIRECTORY`), for it needs
`tokenizers`, which vLLM has and we do not. The demo, the benchmark and the real-vLLM tests serve
this model with `--load-format dummy`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY_SIZE = 320
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
# Enough different words for all the merges between the 256 bytes and the vocabulary's size.
TRAINING_TEXT = (
    "A full collection walks every tracked object, so its pause grows with the heap.",
    "Freeze moves the heap out of the collector's sight; maintain collects between measurements.",
    "Restore puts back thresholds, enabled flag and frozen state exactly as they were found.",
    "The quick brown fox jumps over the lazy dog, and the worker steps in lockstep with its peers.",
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    # Two heads of each kind, so that the model splits over two workers.
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN,
    "eos_token": END,
    "pad_token": PAD,
    "model_max_length": CONFIG["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
}


def make_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}"
        )
    tokenizer.save(str(path))


def make_tiny_model(directory: Path) -> Path:
    """Write the model's files into `directory` and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    make_tokenizer(directory / "tokenizer.json")
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: tiny_model.py DIRECTORY")
    print(make_tiny_model(Path(sys.argv[1])))
