"""Makes a tiny model with random weights: `tiny.py KIND DIRECTORY SEED`."""

import sys

import torch
import transformers

kind, place, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(seed)
common = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
if kind == "llama":
    config = transformers.LlamaConfig(num_hidden_layers=4, head_dim=32, **common)
    model = transformers.LlamaForCausalLM(config)
elif kind == "wide":  # 64 KiB of keys and values for a token
    common.update(num_attention_heads=8, num_key_value_heads=8)
    config = transformers.LlamaConfig(num_hidden_layers=16, head_dim=128, **common)
    model = transformers.LlamaForCausalLM(config)
elif kind == "lfm2":  # layers with recurrent states beside layers with attention
    types = ["conv", "full_attention"] * 2
    named = dict(layer_types=types, block_dim=128, conv_dim=128, block_auto_adjust_ff_dim=False)
    config = transformers.Lfm2Config(num_hidden_layers=4, **named, **common)
    model = transformers.Lfm2ForCausalLM(config)
else:  # layers with a sliding window beside layers without one
    config = transformers.Gemma3TextConfig(num_hidden_layers=4, head_dim=32, sliding_window=64, sliding_window_pattern=2, **common)
    model = transformers.Gemma3ForCausalLM(config)
# Weights so large that the output depends on what was read.
for name, weight in model.named_parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=0.08)
model.to(torch.bfloat16).save_pretrained(place)
