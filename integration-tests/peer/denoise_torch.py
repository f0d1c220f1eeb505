#!/usr/bin/env python3
"""The PyTorch peer of `omni bench denoise`: one denoise step of HunyuanImage-3.0 on the CPU.

Reads a checkpoint directory in the Hugging Face layout, first checks itself against the recorded
predictions (golden 03), then times the step: stem, every layer, head, Euler update; both guidance rows
packed in one batch; prefix keys and values cached. The VAE is not part of a step.

    python3 denoise_torch.py --model ../fixtures/golden/model --golden ../fixtures/golden --threads 2 --json

Needs `pip install torch safetensors numpy`.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from safetensors import safe_open
    from safetensors.torch import load_file
except ImportError as missing:
    sys.exit(f"{missing}: run `pip install torch safetensors numpy` or set PYTHON to an interpreter that has them")

# Largest difference from the golden predictions that still counts as the same arithmetic.
TOLERANCE = 1e-3


def scalar(value):
    """Per-layer configuration values may be a list; released checkpoints use one value throughout."""
    return value[0] if isinstance(value, list) else value


def load_weights(directory):
    """All backbone tensors, widened to float32. Shards are found through the index."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = [p.name for p in directory.glob("*.safetensors")]
    weights = {}
    for shard in shards:
        with safe_open(directory / shard, framework="pt") as handle:
            for name in handle.keys():
                if name.startswith(("vae.", "vision_", "lm_head", "model.ln_f")):
                    continue
                weights[name] = handle.get_tensor(name).float()
    return weights


class TimeEmbedder:
    """Sinusoid of 256 values (cosines first), then a two-layer perceptron with exact GELU."""

    def __init__(self, weights, prefix):
        self.w0, self.b0 = weights[f"{prefix}.mlp.0.weight"], weights[f"{prefix}.mlp.0.bias"]
        self.w2, self.b2 = weights[f"{prefix}.mlp.2.weight"], weights[f"{prefix}.mlp.2.bias"]
        half = self.w0.shape[1] // 2
        self.freqs = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)

    def __call__(self, t):
        angle = t.reshape(-1, 1) * self.freqs
        wave = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return F.linear(F.gelu(F.linear(wave, self.w0, self.b0)), self.w2, self.b2)


class ResBlock:
    """Residual block with adaptive group norm: the embedding gives scale (first half) and shift."""

    def __init__(self, weights, prefix):
        def pair(name):
            return weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.bias"]

        self.norm_in, self.conv_in = pair("in_layers.0"), pair("in_layers.2")
        self.emb = pair("emb_layers.1")
        self.norm_out, self.conv_out = pair("out_layers.0"), pair("out_layers.3")
        self.skip = pair("skip_connection")

    def __call__(self, x, emb):
        h = F.conv2d(F.silu(F.group_norm(x, 32, *self.norm_in, 1e-5)), *self.conv_in, padding=1)
        scale, shift = F.linear(F.silu(emb), *self.emb)[:, :, None, None].chunk(2, dim=1)
        h = torch.addcmul(shift, F.group_norm(h, 32, *self.norm_out, 1e-5), 1 + scale)
        h = F.conv2d(F.silu(h), *self.conv_out, padding=1)
        return F.conv2d(x, *self.skip) + h


class Layer:
    """One decoder layer. Expert weights are stacked so that a group is one matrix product."""

    def __init__(self, weights, index, config, moe):
        p = f"model.layers.{index}"
        self.eps = config["rms_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.dim = config.get("attention_head_dim") or config["head_dim"]
        self.top_k, self.moe = scalar(config["moe_topk"]), moe
        self.norm_attn = weights[f"{p}.input_layernorm.weight"]
        self.norm_mlp = weights[f"{p}.post_attention_layernorm.weight"]
        self.qkv = weights[f"{p}.self_attn.qkv_proj.weight"]
        self.out = weights[f"{p}.self_attn.o_proj.weight"]
        self.norm_q = weights[f"{p}.self_attn.query_layernorm.weight"]
        self.norm_k = weights[f"{p}.self_attn.key_layernorm.weight"]
        self.gate = weights[f"{p}.mlp.gate.wg.weight"]
        self.shared_in = weights[f"{p}.mlp.shared_mlp.gate_and_up_proj.weight"]
        self.shared_out = weights[f"{p}.mlp.shared_mlp.down_proj.weight"]
        experts = range(scalar(config["num_experts"]))
        self.expert_in = [weights[f"{p}.mlp.experts.{e}.gate_and_up_proj.weight"] for e in experts]
        self.expert_out = [weights[f"{p}.mlp.experts.{e}.down_proj.weight"] for e in experts]
        self.stacked_in = torch.stack(self.expert_in).transpose(1, 2).contiguous()
        self.stacked_out = torch.stack(self.expert_out).transpose(1, 2).contiguous()

    def project(self, x, cos, sin):
        """Queries, keys and values [rows, heads, tokens, dim]; rotation first, then the per-head norm."""
        rows, tokens, _ = x.shape
        group = self.heads // self.kv_heads
        qkv = F.linear(F.rms_norm(x, (x.shape[-1],), self.norm_attn, self.eps), self.qkv)
        qkv = qkv.view(rows, tokens, self.kv_heads, group + 2, self.dim)
        rotated = qkv[..., : group + 1, :]
        half = self.dim // 2
        swapped = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        q = F.rms_norm(rotated[..., :group, :], (self.dim,), self.norm_q, self.eps)
        k = F.rms_norm(rotated[..., group, :], (self.dim,), self.norm_k, self.eps)
        q = q.reshape(rows, tokens, self.heads, self.dim).transpose(1, 2)
        return q, k.transpose(1, 2), qkv[..., group + 1, :].transpose(1, 2)

    def experts(self, x):
        """Routed experts plus the shared one over [tokens, hidden]; float32 router, no dropping."""
        probs = F.linear(x, self.gate).softmax(dim=-1)
        weight, chosen = probs.topk(self.top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        up, gate = F.linear(x, self.shared_in).chunk(2, dim=-1)
        shared = F.linear(up * F.silu(gate), self.shared_out)
        return shared + getattr(self, f"moe_{self.moe}")(x, weight, chosen)

    def moe_grouped(self, x, weight, chosen):
        """Tokens sorted by expert, one pair of products per expert."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.expert_in)).tolist()
        token = order // self.top_k
        gathered = x.index_select(0, token).split(counts)
        parts = []
        for rows, w_in, w_out in zip(gathered, self.expert_in, self.expert_out):
            up, gate = F.linear(rows, w_in).chunk(2, dim=-1)
            parts.append(F.linear(up * F.silu(gate), w_out))
        routed = torch.cat(parts) * weight.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, token, routed)

    def moe_batched(self, x, weight, chosen):
        """Every expert on every token in two batched products: wasteful, but free of gathers."""
        dense = torch.zeros(x.shape[0], self.stacked_in.shape[0]).scatter_(1, chosen, weight)
        up, gate = torch.matmul(x, self.stacked_in).chunk(2, dim=-1)
        routed = torch.bmm(up * F.silu(gate), self.stacked_out)
        return torch.einsum("eth,te->th", routed, dense)

    def mlp(self, x):
        flat = x.view(-1, x.shape[-1])
        y = self.experts(F.rms_norm(flat, (x.shape[-1],), self.norm_mlp, self.eps))
        return x + y.view_as(x)


class Denoiser:
    """The diffusion path: prefix once, then steps against it."""

    def __init__(self, directory, moe="grouped"):
        self.config = json.loads((directory / "config.json").read_text())
        weights = load_weights(directory)
        self.wte = weights["model.wte.weight"]
        self.layers = [Layer(weights, i, self.config, moe) for i in range(self.config["num_hidden_layers"])]
        self.timestep_emb = TimeEmbedder(weights, "timestep_emb")
        self.time_embed = TimeEmbedder(weights, "time_embed")
        self.time_embed_2 = TimeEmbedder(weights, "time_embed_2")
        self.stem_conv = weights["patch_embed.model.0.weight"], weights["patch_embed.model.0.bias"]
        self.stem = ResBlock(weights, "patch_embed.model.1")
        self.head = ResBlock(weights, "final_layer.model.0")
        self.head_norm = weights["final_layer.model.1.0.weight"], weights["final_layer.model.1.0.bias"]
        self.head_conv = weights["final_layer.model.1.2.weight"], weights["final_layer.model.1.2.bias"]
        self.dim = self.layers[0].dim

    def rope(self, yx):
        """cos and sin [tokens, 1, 1, dim]: even pairs turn with y, odd pairs with x."""
        pair = torch.arange(self.dim // 2)
        freq = self.config["rope_theta"] ** (-2.0 * pair.float() / self.dim)
        angle = yx.float()[:, pair % 2] * freq
        angle = torch.cat([angle, angle], dim=-1)[:, None, None, :]
        return angle.cos(), angle.sin()

    def prefill(self, ids, positions, image_tokens):
        """Prefix ids [rows, P]: fills the cache; room for the timestep and image tokens follows it."""
        rows, prefix = ids.shape
        self.prefix = prefix
        total = prefix + 1 + image_tokens
        cos, sin = self.rope(positions[:prefix])
        self.cos, self.sin = self.rope(positions[prefix:total])
        x = self.wte[ids]
        self.cache = []
        for layer in self.layers:
            q, k, v = layer.project(x, cos, sin)
            store = [torch.empty(rows, layer.kv_heads, total, self.dim) for _ in range(2)]
            store[0][:, :, :prefix], store[1][:, :, :prefix] = k, v
            self.cache.append(store)
            x = self.finish(layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    @staticmethod
    def finish(layer, x, attended):
        rows, tokens, _ = x.shape
        x = x + F.linear(attended.transpose(1, 2).reshape(rows, tokens, -1), layer.out)
        return layer.mlp(x)

    def predict(self, latents, t):
        """Velocity [rows, C, h, w] from latents [1, C, h, w]: both rows share the stem's result."""
        rows = self.cache[0][0].shape[0]
        _, _, height, width = latents.shape
        image = self.stem(F.conv2d(latents, *self.stem_conv, padding=1), self.time_embed(t))
        image = image.flatten(2).transpose(1, 2)
        x = torch.cat([self.timestep_emb(t)[:, None], image], dim=1).expand(rows, -1, -1)
        first = self.prefix + 1
        for layer, (keys, values) in zip(self.layers, self.cache):
            q, k, v = layer.project(x, self.cos, self.sin)
            keys[:, :, self.prefix :], values[:, :, self.prefix :] = k, v
            # The timestep token is causal, the image tokens see everything: two calls and no mask.
            attended = torch.cat(
                [
                    F.scaled_dot_product_attention(
                        q[:, :, :1], keys[:, :, :first], values[:, :, :first], enable_gqa=True
                    ),
                    F.scaled_dot_product_attention(q[:, :, 1:], keys, values, enable_gqa=True),
                ],
                dim=2,
            )
            x = self.finish(layer, x, attended)
        hidden = x[:, 1:].transpose(1, 2).reshape(rows, -1, height, width)
        hidden = self.head(hidden, self.time_embed_2(t).expand(rows, -1))
        return F.conv2d(F.silu(F.group_norm(hidden, 32, *self.head_norm, 1e-5)), *self.head_conv, padding=1)

    def step(self, latents, t, delta, guidance):
        """One Euler step under classifier-free guidance."""
        cond, uncond = self.predict(latents, t).chunk(2)
        return latents + (uncond + guidance * (cond - uncond)) * delta


def golden_case(directory):
    """Token ids, positions and recorded steps of the square golden request."""
    layouts = load_file(directory / "01_layouts.safetensors")
    case = load_file(directory / "03_denoise_1x1_4steps.safetensors")
    meta = json.loads((directory / "01_layouts.json").read_text())
    layout = next(c for c in meta if c["id"] == "t2i_1x1")
    prefix = layout["gen_timestep_index"][0][0]
    ids = layouts["t2i_1x1.tokens"].long()
    yx = layouts["t2i_1x1.positions_yx"][0]
    return ids[:, :prefix], yx, case


def check(model, case, guidance):
    """Largest difference from the recorded predictions and latents over the whole run."""
    worst = 0.0
    latents = case["init_latents"]
    sigmas = case["sigmas"]
    for i, t in enumerate(case["timesteps"]):
        pred = model.predict(latents, t)
        for row, name in enumerate(("pred_cond", "pred_uncond")):
            worst = max(worst, (pred[row] - case[name][i, 0]).abs().max().item())
        latents = model.step(latents, t, sigmas[i + 1] - sigmas[i], guidance)
        worst = max(worst, (latents - case["latents"][i]).abs().max().item())
    return worst


def measure(model, case, guidance, steps, warmup):
    """Milliseconds of each timed step."""
    latents, t = case["init_latents"], case["timesteps"][1]
    delta = case["sigmas"][2] - case["sigmas"][1]
    times = []
    for i in range(warmup + steps):
        start = time.perf_counter()
        model.step(latents, t, delta, guidance)
        if i >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def main():
    here = Path(__file__).resolve().parent
    fixtures = here.parent / "fixtures" / "golden"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=fixtures / "model")
    parser.add_argument("--golden", type=Path, default=fixtures)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--moe", choices=("grouped", "batched"), default="grouped")
    parser.add_argument("--compile", action="store_true", help="torch.compile the prediction")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        ids, positions, case = golden_case(args.golden)
        guidance = 5.0
        model = Denoiser(args.model, args.moe)
        _, _, height, width = case["init_latents"].shape
        model.prefill(ids, positions, height * width)
        if args.compile:
            model.predict = torch.compile(model.predict)
        worst = check(model, case, guidance)
        if not worst <= TOLERANCE:
            sys.exit(f"predictions differ from golden 03 by {worst:.3e}, more than {TOLERANCE:.0e}")
        times = measure(model, case, guidance, args.steps, args.warmup)
    result = {
        "peer": f"torch {torch.__version__}",
        "threads": args.threads,
        "moe": args.moe,
        "compiled": args.compile,
        "rows": int(ids.shape[0]),
        "queries_per_row": 1 + height * width,
        "prefix_tokens": int(ids.shape[1]),
        "steps": args.steps,
        "max_abs_diff": worst,
        "ms_per_step": statistics.median(times),
        "ms_per_step_min": min(times),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:18} {value}")


if __name__ == "__main__":
    main()
