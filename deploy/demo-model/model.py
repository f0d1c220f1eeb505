"""HunyuanImage-3.0 in PyTorch, small enough to train: same blocks, same tensor names.

Activations are [batch, tokens, hidden]; pictures and latents are [B, C, H, W] (a frame axis T is
added for the 3-D VAE). The numbering of the comments follows the model specification's topics.
Experts are kept fused (one tensor for all experts of a layer) because eight tiny experts run
fastest as one dense product; `to_checkpoint` and `from_checkpoint` translate to the real names.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

GN_SILU = None  # a fused kernel for SiLU(GroupNorm(x)) of channels-last pictures, set by the trainer


def norm_silu(x, norm):
    if x.ndim == 4 and GN_SILU is not None:
        return GN_SILU(x, norm.weight, norm.bias, norm.num_groups, norm.eps)
    return F.silu(F.group_norm(x.float(), norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)).to(x.dtype)


# --------------------------------------------------------------------------------- embedders


def sinusoid(t, dim=256):
    """t [B] fp32 -> [B, dim]: cosines first, then sines."""
    half = dim // 2
    freq = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angle = t.float()[:, None] * freq[None]
    return torch.cat([angle.cos(), angle.sin()], -1)


class TimeEmbedder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, t):
        return self.mlp(sinusoid(t).to(self.mlp[0].weight.dtype))


class AdaResBlock(nn.Module):
    """Residual block whose second GroupNorm is scaled and shifted by the time embedding."""

    def __init__(self, cin, cout, emb):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * cout))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, cout), nn.SiLU(), nn.Identity(), nn.Conv2d(cout, cout, 3, padding=1)
        )
        self.skip_connection = nn.Conv2d(cin, cout, 1)

    def forward(self, x, emb):
        a = self.in_layers[2](norm_silu(x, self.in_layers[0]))
        scale, shift = self.emb_layers(emb)[:, :, None, None].float().chunk(2, 1)
        norm = self.out_layers[0]
        a = F.group_norm(a.float(), norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)
        a = F.silu(a * (1 + scale) + shift).to(x.dtype)
        return self.skip_connection(x) + self.out_layers[3](a)


class PatchEmbed(nn.Module):
    def __init__(self, latent, mid, hidden):
        super().__init__()
        self.model = nn.ModuleList([nn.Conv2d(latent, mid, 3, padding=1), AdaResBlock(mid, hidden, hidden)])

    def forward(self, x, emb):
        y = self.model[1](self.model[0](x), emb)
        return y.flatten(2).transpose(1, 2)  # raster order [B, h*w, hidden]


class FinalLayer(nn.Module):
    def __init__(self, hidden, mid, latent):
        super().__init__()
        out = nn.Sequential(nn.GroupNorm(32, mid), nn.SiLU(), nn.Conv2d(mid, latent, 3, padding=1))
        self.model = nn.ModuleList([AdaResBlock(hidden, mid, hidden), out])

    def forward(self, x, emb, h, w):
        x = x.transpose(1, 2).reshape(x.shape[0], -1, h, w)
        y = self.model[0](x, emb)
        return self.model[1][2](norm_silu(y, self.model[1][0])).float()


# ---------------------------------------------------------------------------------- backbone


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight.to(x.dtype)


def rope_table(pos, dim, theta=10000.0):
    """pos [B, S, 2] (y, x) -> cos, sin [B, S, dim]; even frequencies turn with y, odd with x."""
    j = torch.arange(dim // 2, device=pos.device)
    freq = theta ** (-2.0 * j.float() / dim)
    angle = pos.float()[..., j % 2] * freq
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.q, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["attention_head_dim"]
        self.qkv_proj = nn.Linear(c["hidden_size"], (self.q + 2 * self.kv) * self.dim, bias=False)
        self.o_proj = nn.Linear(self.q * self.dim, c["hidden_size"], bias=False)
        self.query_layernorm = RMSNorm(self.dim, c["rms_norm_eps"])
        self.key_layernorm = RMSNorm(self.dim, c["rms_norm_eps"])

    def project(self, x, cos, sin):
        """x -> q [B, Hq, S, D], k, v [B, Hkv, S, D]: rotated first, then normalised per head."""
        b, s, _ = x.shape
        g = self.q // self.kv
        qkv = self.qkv_proj(x).view(b, s, self.kv, g + 2, self.dim)
        cos, sin = cos[:, :, None, None], sin[:, :, None, None]
        q = self.query_layernorm(rotate(qkv[:, :, :, :g].float(), cos, sin)).to(x.dtype)
        k = self.key_layernorm(rotate(qkv[:, :, :, g : g + 1].float(), cos, sin)).to(x.dtype)
        q = q.reshape(b, s, self.q, self.dim).transpose(1, 2)
        return q, k.reshape(b, s, self.kv, self.dim).transpose(1, 2), qkv[:, :, :, g + 1].transpose(1, 2)

    def attend(self, q, k, v, mask):
        g = self.q // self.kv
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin, mask):
        return self.attend(*self.project(x, cos, sin), mask)


class Moe(nn.Module):
    """Top-k experts with renormalised weights plus one shared expert; up first, gate second."""

    def __init__(self, c, layer):
        super().__init__()
        h, self.e = c["hidden_size"], c["num_experts"]
        self.i = c["moe_intermediate_size"][layer]
        self.k = c["moe_topk"][layer]
        self.wg = nn.Parameter(torch.randn(self.e, h) * 0.02)
        self.w_in = nn.Parameter(torch.randn((self.e + 1) * 2 * self.i, h) * 0.02)
        self.w_out = nn.Parameter(torch.randn(h, (self.e + 1) * self.i) * 0.02)

    def route(self, x):
        """fp32 softmax over all experts; returns logits, probabilities, dense top-k weights."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.wg.float())
        p = logits.softmax(-1)
        left, chosen = p, torch.zeros_like(p)
        slots = torch.arange(self.e, device=x.device)
        for _ in range(self.k):
            hit = (left.argmax(-1, keepdim=True) == slots).float()
            chosen = chosen + hit
            left = left - 2 * hit
        w = p * chosen
        return logits, p, chosen, w / w.sum(-1, keepdim=True)

    def forward(self, x, valid=None):
        _, p, chosen, w = self.route(x)
        h = F.linear(x, self.w_in).unflatten(-1, (self.e + 1, 2, self.i))
        comb = torch.cat([w, torch.ones_like(w[..., :1])], -1).to(h.dtype)
        a = h[..., 0, :] * F.silu(h[..., 1, :]) * comb[..., None]
        y = F.linear(a.flatten(-2), self.w_out)
        if valid is None:
            return y, None
        n = valid.sum().clamp(min=1)
        share = (chosen.detach() * valid[..., None]).sum((0, 1)) / n
        aux = self.e / self.k * (share * (p * valid[..., None]).sum((0, 1)) / n).sum()
        return y, aux


class Layer(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Moe(c, layer)

    def forward(self, x, cos, sin, mask, valid=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        y, aux = self.mlp(self.post_attention_layernorm(x), valid)
        return x + y, aux


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList([Layer(c, i) for i in range(c["num_hidden_layers"])])
        self.ln_f = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, cos, sin, mask, valid=None):
        total = 0.0
        for layer in self.layers:
            x, aux = layer(x, cos, sin, mask, valid)
            total = total + aux if aux is not None else total
        return x, total


# --------------------------------------------------------------------------------------- VAE


class Conv(nn.Conv3d):
    """A 3-D convolution that, given a picture without frames, applies its middle temporal tap.

    On four identical frames whose kernels are zero off the middle tap both give the same numbers.
    """

    def flatten(self):
        """Training without frames: the middle tap becomes the parameter `flat`."""
        self.flat = nn.Parameter(self.weight.detach()[:, :, self.kernel_size[0] // 2].clone())
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def unflatten(self):
        self.weight[:, :, self.kernel_size[0] // 2] = self.flat
        del self.flat

    def forward(self, x):
        if x.ndim == 5:
            return super().forward(x)
        w = self.flat if hasattr(self, "flat") else self.weight[:, :, self.kernel_size[0] // 2]
        return F.conv2d(x, w, self.bias, padding=self.padding[1])


def conv3(cin, cout):
    return Conv(cin, cout, 3, padding=1)


def gather_blocks(x, temporal):
    """Space-to-channel: sub-position major, channel minor."""
    if x.ndim == 4:
        b, c, h, w = x.shape
        y = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
        return torch.cat([y, y], 1) if temporal else y
    b, c, t, h, w = x.shape
    r = 2 if temporal else 1
    y = x.view(b, c, t // r, r, h // 2, 2, w // 2, 2).permute(0, 3, 5, 7, 1, 2, 4, 6)
    return y.reshape(b, 4 * r * c, t // r, h // 2, w // 2)


def spread_blocks(x, temporal):
    """Channel-to-space, the inverse; a picture without frames keeps the last frame's half."""
    if x.ndim == 4:
        if temporal:
            x = x[:, x.shape[1] // 2 :]
        b, c, h, w = x.shape
        return x.reshape(b, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(b, c // 4, 2 * h, 2 * w)
    b, c, t, h, w = x.shape
    r = 2 if temporal else 1
    y = x.view(b, r, 2, 2, c // (4 * r), t, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return y.reshape(b, c // (4 * r), r * t, 2 * h, 2 * w)


class VaeBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, c, eps=1e-6), nn.GroupNorm(32, c, eps=1e-6)
        self.conv1, self.conv2 = conv3(c, c), conv3(c, c)

    def forward(self, x):
        return x + self.conv2(norm_silu(self.conv1(norm_silu(x, self.norm1)), self.norm2))


class VaeAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(32, c, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (Conv(c, c, 1) for _ in range(4))

    def forward(self, x):
        y = F.group_norm(x.float(), 32, self.norm.weight.float(), self.norm.bias.float(), 1e-6).to(x.dtype)
        q, k, v = (m(y).flatten(2).transpose(1, 2) for m in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.proj_out(a.transpose(1, 2).reshape(x.shape))


class Down(nn.Module):
    def __init__(self, cin, cout, temporal):
        super().__init__()
        self.temporal, self.factor = temporal, 8 if temporal else 4
        self.cout = cout
        self.conv = conv3(cin, cout // self.factor)

    def forward(self, x):
        short = gather_blocks(x, self.temporal)
        short = short.unflatten(1, (self.cout, -1)).mean(2)
        return gather_blocks(self.conv(x), self.temporal) + short


class Up(nn.Module):
    def __init__(self, cin, cout, temporal):
        super().__init__()
        self.temporal, self.factor = temporal, 8 if temporal else 4
        self.repeat = self.factor * cout // cin
        self.conv = conv3(cin, cout * self.factor)

    def forward(self, x):
        return spread_blocks(self.conv(x) + x.repeat_interleave(self.repeat, 1), self.temporal)


class Mid(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = VaeBlock(c), VaeAttention(c), VaeBlock(c)

    def forward(self, x):
        return self.block_2(self.attn_1(self.block_1(x)))


class Stage(nn.Module):
    def __init__(self, c, blocks, name=None, resample=None):
        super().__init__()
        self.block = nn.ModuleList([VaeBlock(c) for _ in range(blocks)])
        self.resample = name
        if name:
            setattr(self, name, resample)

    def forward(self, x):
        for b in self.block:
            x = b(x)
        return getattr(self, self.resample)(x) if self.resample else x


def _temporal_levels(v):
    space, time = int(math.log2(v["ffactor_spatial"])), int(math.log2(v["ffactor_temporal"]))
    return space, time


class Encoder(nn.Module):
    def __init__(self, v):
        super().__init__()
        ch, n = v["block_out_channels"], v["layers_per_block"]
        space, time = _temporal_levels(v)
        self.latent = v["latent_channels"]
        self.conv_in = conv3(v["in_channels"], ch[0])
        self.down = nn.ModuleList()
        for i, c in enumerate(ch):
            down = i < space and Down(c, ch[i + 1], i >= space - time)
            self.down.append(Stage(c, n, "downsample", down) if down else Stage(c, n))
        self.mid = Mid(ch[-1])
        self.norm_out = nn.GroupNorm(32, ch[-1], eps=1e-6)
        self.conv_out = conv3(ch[-1], 2 * self.latent)

    def forward(self, x):
        """Pixels in [-1, 1] -> moments [B, 2*latent, ...]."""
        x = self.conv_in(x)
        for d in self.down:
            x = d(x)
        x = self.mid(x)
        short = x.unflatten(1, (2 * self.latent, -1)).mean(2)
        return self.conv_out(norm_silu(x, self.norm_out)) + short


class Decoder(nn.Module):
    def __init__(self, v):
        super().__init__()
        ch, n = v["block_out_channels"][::-1], v["layers_per_block"] + 1
        space, time = _temporal_levels(v)
        self.repeat = ch[0] // v["latent_channels"]
        self.conv_in = conv3(v["latent_channels"], ch[0])
        self.mid = Mid(ch[0])
        self.up = nn.ModuleList()
        for i, c in enumerate(ch):
            up = i < space and Up(c, ch[i + 1], i < time)
            self.up.append(Stage(c, n, "upsample", up) if up else Stage(c, n))
        self.norm_out = nn.GroupNorm(32, ch[-1], eps=1e-6)
        self.conv_out = conv3(ch[-1], v["out_channels"])

    def forward(self, z):
        x = self.mid(self.conv_in(z) + z.repeat_interleave(self.repeat, 1))
        for u in self.up:
            x = u(x)
        return self.conv_out(norm_silu(x, self.norm_out))


class Vae(nn.Module):
    def __init__(self, v):
        super().__init__()
        self.scale = v["scaling_factor"]
        self.encoder, self.decoder = Encoder(v), Decoder(v)

    def moments(self, x):
        mean, logvar = self.encoder(x).float().chunk(2, 1)
        return mean, logvar.clamp(-30, 20)

    def decode_u8(self, latents, flat=False):
        """Scaled latents [B, C, h, w] -> pixels uint8 [B, H, W, 3]."""
        z = latents / self.scale
        x = self.decoder(z) if flat else self.decoder(z[:, :, None])[:, :, -1]
        return ((x.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)

    @torch.no_grad()
    def inflate(self):
        """Makes the frame-free training exact in 3-D: zero outer taps, equal frames from every Up."""
        for m in self.modules():
            if isinstance(m, Conv) and m.kernel_size[0] == 3:
                m.weight[:, :, 0] = 0
                m.weight[:, :, 2] = 0
        for m in self.decoder.modules():
            if not (isinstance(m, Up) and m.temporal):
                continue
            half, rows = m.conv.out_channels // 2, torch.arange(m.conv.out_channels // 2)
            w = m.conv.weight
            w[:half] = w[half:]
            m.conv.bias[:half] = m.conv.bias[half:]
            # the shortcut feeds other input channels to the first frame: cancel the difference
            w[rows, (rows + half) // m.repeat, 1, 1, 1] += 1
            w[rows, rows // m.repeat, 1, 1, 1] -= 1


# --------------------------------------------------------------------------------------- ViT


class VitLayer(nn.Module):
    def __init__(self, v):
        super().__init__()
        h, self.heads = v["hidden_size"], v["num_attention_heads"]
        self.layer_norm1 = nn.LayerNorm(h, v["layer_norm_eps"])
        self.layer_norm2 = nn.LayerNorm(h, v["layer_norm_eps"])
        self.self_attn = nn.ModuleDict({n: nn.Linear(h, h) for n in ("q_proj", "k_proj", "v_proj", "out_proj")})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(h, v["intermediate_size"]), "fc2": nn.Linear(v["intermediate_size"], h)})

    def forward(self, x, mask):
        y = self.layer_norm1(x)
        q, k, v = (self.self_attn[n](y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("q_proj", "k_proj", "v_proj"))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.self_attn["out_proj"](a.transpose(1, 2).flatten(2))
        y = F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh")
        return x + self.mlp["fc2"](y)


class VisionModel(nn.Module):
    def __init__(self, v):
        super().__init__()
        h, p = v["hidden_size"], v["patch_size"]
        self.grid = int(v["num_patches"] ** 0.5)
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Linear(v["num_channels"] * p * p, h)
        self.embeddings.position_embedding = nn.Embedding(v["num_patches"], h)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([VitLayer(v) for _ in range(v["num_hidden_layers"])])
        self.post_layernorm = nn.LayerNorm(h, v["layer_norm_eps"])

    def positions(self, h, w, total):
        """Position table resized to h x w; padding rows take the first patch's entry."""
        table = self.embeddings.position_embedding.weight.float()
        table = table.reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        table = F.interpolate(table, (h, w), mode="bilinear", align_corners=False, antialias=True)
        pos = table.flatten(2).transpose(1, 2)[0]
        return torch.cat([pos, pos[:1].expand(total - h * w, -1)])

    def forward(self, pixels, h, w):
        """pixels [B, P, 768] of one h x w patch grid, zero-padded to P -> [B, P, hidden]."""
        n = pixels.shape[1]
        x = self.embeddings.patch_embedding(pixels) + self.positions(h, w, n).to(pixels.dtype)
        mask = (torch.arange(n, device=pixels.device) < h * w)[None, None, None]
        for layer in self.encoder.layers:
            x = layer(x, mask)
        return self.post_layernorm(x)


class Aligner(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(a["input_dim"], a["n_embed"]), nn.GELU(), nn.Linear(a["n_embed"], a["n_embed"]))

    def forward(self, x):
        return self.layers(x)


# ------------------------------------------------------------------------------------- whole


class HunyuanImage3(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        h, latent = c["hidden_size"], c["vae"]["latent_channels"]
        mid = c.get("patch_embed_hidden_dim", 1024)
        self.model = Backbone(c)
        self.lm_head = nn.Linear(h, c["vocab_size"], bias=False)
        self.timestep_emb, self.time_embed, self.time_embed_2 = TimeEmbedder(h), TimeEmbedder(h), TimeEmbedder(h)
        self.patch_embed = PatchEmbed(latent, mid, h)
        self.final_layer = FinalLayer(h, mid, latent)
        self.vae = Vae(c["vae"])
        self.vision_model = VisionModel(c["vit"])
        self.vision_aligner = Aligner(c["vit_aligner"])

    def logits(self, x):
        return self.lm_head(self.model.ln_f(x)).float()

    @torch.no_grad()
    def init(self):
        depth = 2 * len(self.model.layers)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02 if m.in_features >= 256 else m.in_features**-0.5)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
        nn.init.normal_(self.model.wte.weight, std=0.1)
        for layer in self.model.layers:
            nn.init.normal_(layer.self_attn.qkv_proj.weight, std=0.04)
            nn.init.normal_(layer.mlp.w_in, std=0.04)
            nn.init.normal_(layer.self_attn.o_proj.weight, std=0.06 / depth**0.5)
            nn.init.normal_(layer.mlp.w_out, std=0.06 / depth**0.5)
        for block in (self.patch_embed.model[1], self.final_layer.model[0]):
            nn.init.zeros_(block.emb_layers[1].weight)
            nn.init.zeros_(block.emb_layers[1].bias)
        nn.init.zeros_(self.final_layer.model[1][2].weight)
        nn.init.zeros_(self.final_layer.model[1][2].bias)
        for m in self.vae.modules():
            if isinstance(m, Conv):
                fan = m.in_channels * m.kernel_size[1] ** 2
                nn.init.normal_(m.weight, std=fan**-0.5)
                nn.init.zeros_(m.bias)
            if isinstance(m, VaeBlock):
                nn.init.zeros_(m.conv2.weight)
            if isinstance(m, (Down, Up)):
                m.conv.weight.mul_(0.3)
        return self


def attention_mask(order, span):
    """order, span [B, S] -> [B, 1, S, S] bool, True = may attend.

    order: index in the sequence, -1 for padding; span: 0 causal, > 0 the token's full block.
    Storage order is free: only `order` decides what precedes what. Padding sees itself.
    """
    q, k = order[:, :, None], order[:, None, :]
    same = (span[:, :, None] == span[:, None, :]) & (span[:, :, None] > 0)
    allow = (k >= 0) & ((k <= q) | same)
    eye = torch.eye(order.shape[1], dtype=torch.bool, device=order.device)
    return (allow | eye)[:, None]


def image_positions(start, h, w):
    """Centred 2-D positions of an h x w span at sequence index start [B] -> [B, h*w, 2] (y, x)."""
    dev = start.device
    y = start[:, None].float() + (w * h - h) / 2 + torch.arange(h, device=dev).repeat_interleave(w)
    x = start[:, None].float() + (w * h - w) / 2 + torch.arange(w, device=dev).repeat(h)
    return torch.stack([y, x], -1).trunc()


# -------------------------------------------------------------------------------- checkpoints


def to_checkpoint(model):
    """Module state -> {real tensor name: fp32 tensor}."""
    out = {}
    for name, t in model.state_dict().items():
        if ".mlp.w_in" not in name and ".mlp.w_out" not in name and not name.endswith(".mlp.wg"):
            out[name] = t
            continue
        layer = model.model.layers[int(name.split(".")[2])].mlp
        base, e, i = name.rsplit(".", 1)[0], layer.e, layer.i
        if name.endswith("wg"):
            out[f"{base}.gate.wg.weight"] = t
            continue
        kind = "gate_and_up_proj" if name.endswith("w_in") else "down_proj"
        parts = t.split(2 * i, 0) if name.endswith("w_in") else t.split(i, 1)
        for n, p in enumerate(parts):
            who = f"experts.{n}" if n < e else "shared_mlp"
            out[f"{base}.{who}.{kind}.weight"] = p.contiguous()
    return out


def from_checkpoint(model, tensors):
    """Loads real tensor names; every expected tensor must be there, only the pooling head may be extra."""
    want = set(to_checkpoint(model))
    extra = {n for n in set(tensors) - want if not n.startswith("vision_model.head.")}
    missing = want - set(tensors)
    if extra or missing:
        raise ValueError(f"checkpoint names: missing {sorted(missing)[:4]}, unknown {sorted(extra)[:4]}")
    state = {n: tensors[n].float() for n in want if ".mlp." not in n or not n.startswith("model.layers.")}
    for l, layer in enumerate(model.model.layers):
        base = f"model.layers.{l}.mlp"
        who = [f"experts.{n}" for n in range(layer.mlp.e)] + ["shared_mlp"]
        state[f"{base}.wg"] = tensors[f"{base}.gate.wg.weight"].float()
        state[f"{base}.w_in"] = torch.cat([tensors[f"{base}.{w}.gate_and_up_proj.weight"] for w in who], 0).float()
        state[f"{base}.w_out"] = torch.cat([tensors[f"{base}.{w}.down_proj.weight"] for w in who], 1).float()
    model.load_state_dict(state, strict=True)
    return model
