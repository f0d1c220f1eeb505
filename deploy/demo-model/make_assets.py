"""Writes what training needs: the held-out prompt list and the tokenizer with its configs.

    python make_assets.py eval                 -> prompts_eval.json
    python make_assets.py checkpoint FOLDER    -> tokenizer.json, config.json, ... into FOLDER
"""

import json
import os
import random
import sys

import check
import data

HERE = os.path.dirname(os.path.abspath(__file__))
SEED = 20260117

SPECIALS = (
    ["<|endoftext|>", "<|startoftext|>", "<|extra_0|>", "<|extra_1|>", "<boi>", "<eoi>", "<img>", "<pad>", "<cfg>"]
    + ["<recaption>", "</recaption>", "<think>", "</think>", "<answer>", "</answer>", "<timestep>", "<guidance>"]
    + ["<joint_img_sep>", "<img_size_128>", "<img_size_256>", "<img_size_512>", "<img_size_1024>"]
    + [f"<img_ratio_{k}>" for k in range(33)]
    + ["<|extra_2|>", "<|extra_3|>", "<|extra_4|>"]
    + [f"<img_ratio_{k}>" for k in range(33, 37)]
    + ["<timestep_r>"]
)
SPLIT = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGED = 780  # bytes and merges; the rest up to the model's vocabulary is special or unused
VOCAB = 896


# ------------------------------------------------------------------------------ eval prompts


def _entry(rng, name, category, scene, worded=False, typo=False):
    text = data.caption(rng, scene, with_format=worded, typos=False, named=True)
    if typo:
        text = data.typo(rng, text)
    low = text.lower()
    pos = scene["position"]
    said = pos is not None and any(p in low for p in data.POS_WORDS[pos])
    bg = any(f"{w} b" in low or low.rstrip(".").endswith(f"on {w}") or f"{w} b" in low for w in
             data.SYNONYMS.get(scene["background"], [scene["background"]]))  # fmt: skip
    return {
        "id": name, "category": category, "prompt": text, "format": scene["format"], "typo": typo,
        "expect": check.expectation(scene, position=said, background=bg and not typo),
        "scene": scene,
    }  # fmt: skip


def make_eval():
    rng = random.Random(SEED)
    prompts, edits, banned = [], [], set()
    plan = [("single", 60, 1, False), ("two", 80, 2, False), ("three", 20, 3, False), ("ratio", 40, None, True)]
    for category, count, objects, worded in plan:
        for i in range(count):
            fmt = list(data.FORMATS)[i % 5] if worded else "square"
            scene = data.sample_scene(rng, fmt, objects or rng.choice([1, 2]))
            banned |= data.keys(scene)
            prompts.append(_entry(rng, f"{category}-{i:02d}", category, scene, worded, typo=i % 12 == 11))
    for i in range(42):
        src, text, dst, record = data.sample_edit(rng, data.EDIT_KINDS[i % 3])
        banned |= data.keys(src)
        edits.append({
            "id": f"edit-{i:02d}", "category": record["kind"], "prompt": text, "edit": record,
            "source": src, "expect": check.expectation(dst, position=False),
        })  # fmt: skip
    for e in prompts + edits:
        s = e.get("scene") or e["source"]
        s["vector"] = data.scene_vector(s)
    with open(os.path.join(HERE, "prompts_eval.json"), "w") as f:
        dump = lambda v: json.dumps(v, separators=(",", ":"))  # noqa: E731
        f.write('{"prompts":[\n' + ",\n".join(map(dump, prompts)) + '\n],\n"edits":[\n')
        f.write(",\n".join(map(dump, edits)) + '\n],\n"held_out":' + json.dumps(sorted(banned)) + "}\n")
    print(len(prompts), "prompts,", len(edits), "edits,", len(banned), "held-out combinations")


# --------------------------------------------------------------------------------- tokenizer


def corpus(count=20000):
    rng = random.Random(SEED + 1)
    for _ in range(count):
        s = data.sample_scene(rng)
        yield data.caption(rng, s, with_format=rng.random() < 0.5, typos=False)
        yield data.recaption(s)
        yield data.think(s)
    for _ in range(count // 4):
        yield data.sample_edit(rng)[1]
    yield from ["User: ", "\n\n", "Assistant: "] * 2000


def make_tokenizer():
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tk.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tk.train_from_iterator(corpus(), trainer)
    tk.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tk


def make_config(tk, layers=8):
    ids = {n: tk.token_to_id(n) for n in SPECIALS}
    return {
        "architectures": ["HunyuanImage3ForCausalMM"], "model_type": "hunyuan_image_3_moe",
        "add_classification_head": False, "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": ids["<|startoftext|>"], "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<pad>"], "pad_id": ids["<pad>"], "eod_token_id": ids["<|endoftext|>"],
        "im_start_id": ids["<boi>"], "im_end_id": ids["<eoi>"], "image_token_id": ids["<img>"],
        "im_newline_id": 11, "mask_init_id": 12, "text_start_id": 6, "text_end_id": 7,
        "video_start_id": 9, "video_end_id": 10,
        "capacity_factor": 1.0, "cla_share_factor": 2, "class_num": 0, "group_limited_greedy": False,
        "head_dim": 32, "hidden_act": "silu", "img_proj_type": "unet", "initializer_range": 0.02,
        "kv_lora_rank": None, "max_position_embeddings": 4096, "mlp_bias": False, "moe_drop_tokens": False,
        "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False, "n_group": None,
        "norm_topk_prob": True, "norm_type": "rms", "patch_size": 1, "pool_type": "last", "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None, "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "type": "custom"},
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": None, "use_cache": True,
        "use_cla": False, "use_mixed_mlp_moe": True, "use_mla": False, "use_rotary_pos_emb": True,
        "v_head_dim": None, "vae_downsample_factor": [16, 16], "vocab_size": VOCAB,
        "vae": {"_class_name": "AutoencoderKLConv3D", "in_channels": 3, "out_channels": 3, "ffactor_spatial": 16,
                "ffactor_temporal": 4, "downsample_match_channel": True, "upsample_match_channel": True,
                "block_out_channels": [32, 32, 32, 64, 64], "latent_channels": 16, "layers_per_block": 1,
                "sample_size": 256, "sample_tsize": 16, "scaling_factor": 1.0, "shift_factor": None},
        "vit": {"_attn_implementation": "sdpa", "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-06, "num_channels": 3, "patch_size": 16, "output_attentions": False,
                "output_hidden_states": False, "use_return_dict": True, "torch_dtype": "bfloat16",
                "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
                "num_patches": 16},
        "vit_processor": {"do_convert_rgb": None, "do_normalize": True, "do_rescale": True, "do_resize": True,
                          "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Siglip2ImageProcessorFast",
                          "image_std": [0.5, 0.5, 0.5], "max_num_patches": 64, "patch_size": 16,
                          "processor_class": "Siglip2Processor", "resample": 2,
                          "rescale_factor": 0.00392156862745098},
        "vit_aligner": {"projector_type": "mlp_gelu", "input_dim": 64, "n_embed": 256, "depth": 2,
                        "torch_dtype": "bfloat16"},
        "torch_dtype": "bfloat16", "transformers_version": "4.56.2",
        "hidden_size": 256, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "attention_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": [128] * layers,
        "num_experts": 8, "moe_topk": [2] * layers, "num_shared_expert": [1] * layers, "use_qk_norm": True,
        "rope_theta": 10000.0, "rope_type": "2d", "cond_token_attn_type": "joint_full",
        "cond_image_type": "vae_vit", "patch_embed_hidden_dim": 64, "image_base_size": 256,
    }  # fmt: skip


def make_checkpoint(folder):
    os.makedirs(folder, exist_ok=True)
    tk = make_tokenizer()
    tk.save(os.path.join(folder, "tokenizer.json"))
    ids = {n: tk.token_to_id(n) for n in SPECIALS}
    names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    added = {str(i): {"content": n, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True} for n, i in sorted(ids.items(), key=lambda p: p[1])}  # fmt: skip
    generation = {
        "bos_token_id": ids["<|startoftext|>"], "eos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<pad>"],
        "bot_task": "image", "diff_guidance_scale": 4.0, "diff_infer_steps": 16, "do_sample": False,
        "drop_think": False, "flow_shift": 3.0, "max_length": 2048, "repetition_penalty": 1.0,
        "sequence_template": "pretrain", "temperature": 1.0, "top_k": 50, "top_p": 1.0, "use_system_prompt": "None",
    }  # fmt: skip
    files = {
        "config.json": make_config(tk),
        "generation_config.json": generation,
        "special_tokens_map.json": names,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False,
            "model_max_length": 4096, "add_prefix_space": False, "added_tokens_decoder": added,
        },
    }  # fmt: skip
    for name, value in files.items():
        with open(os.path.join(folder, name), "w") as f:
            json.dump(value, f, indent=1)
            f.write("\n")
    print("tokenizer:", tk.get_vocab_size(), "tokens")


if __name__ == "__main__":
    if sys.argv[1:2] == ["eval"]:
        make_eval()
    elif sys.argv[1:2] == ["checkpoint"] and len(sys.argv) == 3:
        make_checkpoint(sys.argv[2])
    else:
        sys.exit(__doc__)
