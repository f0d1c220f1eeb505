"""Trains the demo model. Everything is seeded; every phase takes a time budget in minutes.

    python train.py vae   --out RUN --minutes 4            picture autoencoder
    python train.py joint --out RUN --minutes 16           transformer: denoising and text
    python train.py export --out RUN --checkpoint FOLDER   bf16 shards with the real tensor names
    python train.py smoke --out RUN                        all of the above, tiny, on a CPU

RUN keeps vae.pt, joint.pt (resumable) and log.txt.
"""

import argparse
import concurrent.futures as futures
import json
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F

import data
import model as M
from optim import VaeOptimiser, lr_factor, make_optimisers

HERE = os.path.dirname(os.path.abspath(__file__))
FORMAT_WEIGHTS = {"square": 0.56, "wide": 0.11, "panorama": 0.11, "tall": 0.11, "tower": 0.11}
IMAGE_SLOTS = 256
EDIT_SLOTS = 632
NEG = float("-inf")


class Log:
    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.f = open(os.path.join(folder, "log.txt"), "a")
        self.t0 = time.monotonic()

    def __call__(self, *parts):
        line = f"[{time.monotonic() - self.t0:7.1f}s] " + " ".join(str(p) for p in parts)
        print(line, flush=True)
        self.f.write(line + "\n")
        self.f.flush()


# ---------------------------------------------------------------------------- background work

_WORKER = {}


def _worker_init(tokenizer_path):
    torch.set_num_threads(1)
    from tokenizers import Tokenizer

    _WORKER["tk"] = Tokenizer.from_file(tokenizer_path)
    _WORKER["banned"] = data.held_out()


def _job(kind, seed, size, fmt):
    if kind == "scene":
        return kind, fmt, data.scene_chunk(seed, size, fmt)
    if kind == "edit":
        return kind, fmt, data.edit_chunk(seed, size, _WORKER["tk"], _WORKER["banned"])
    return kind, fmt, data.t2i_chunk(seed, size, fmt, _WORKER["tk"], _WORKER["banned"])


class Producer:
    """Chunks of scenes from worker processes, always `ahead` of them in flight, in a fixed order."""

    def __init__(self, a, kinds, ahead):
        ctx = torch.multiprocessing.get_context("fork")
        self.pool = futures.ProcessPoolExecutor(a.workers, ctx, _worker_init, (os.path.join(a.assets, "tokenizer.json"),))
        self.rng = random.Random(a.seed)
        self.kinds, self.a, self.queue, self.n = kinds, a, [], 0
        for _ in range(ahead):
            self._submit()

    def _submit(self):
        kind = self.rng.choices(*zip(*self.kinds))[0]
        fmt = self.rng.choices(*zip(*FORMAT_WEIGHTS.items()))[0] if kind != "edit" else "square"
        seed = self.a.seed * 1_000_003 + self.n
        self.n += 1
        self.queue.append(self.pool.submit(_job, kind, seed, self.a.chunk, fmt))

    def next(self):
        self._submit()
        return self.queue.pop(0).result(timeout=120)

    def close(self):
        self.pool.shutdown(wait=False, cancel_futures=True)


# ----------------------------------------------------------------------------------------- vae


def pixels_of(vec, fmt):
    h, w = data.BUCKETS[data.FORMATS[fmt]]
    return data.render(vec, h, w)


def setup(a):
    torch.manual_seed(a.seed)
    if a.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = a.phase == "vae"
        if a.kernel:
            import norm_kernel

            norm_kernel.self_check("cuda")
            norm_kernel.self_check("cuda", torch.bfloat16, 3e-2)
            M.GN_SILU = norm_kernel.norm_silu
    with open(os.path.join(a.assets, "config.json")) as f:
        return json.load(f)


def cast(a):
    return torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.device == "cuda")


def flat(x, a):
    return x.to(memory_format=torch.channels_last) if a.device == "cuda" else x


@torch.no_grad()
def psnr(vae, a, count=64):
    """PSNR of decode(encode(picture)) after rounding to 8 bits, per format, on unseen scenes."""
    out = {}
    for fmt in data.FORMATS:
        vec = torch.from_numpy(data.scene_chunk(10**9 + 7, count, fmt)).to(a.device)
        img = pixels_of(vec, fmt)
        mean, _ = vae.moments(flat(img / 127.5 - 1, a))
        back = vae.decode_u8(flat(mean * vae.scale, a), flat=True).permute(0, 3, 1, 2).float()
        mse = (back - img.round()).pow(2).mean((1, 2, 3))
        out[fmt] = round((10 * torch.log10(255**2 / mse)).mean().item(), 2)
    return out


CROP = 128


def crop_vectors(vec, gen):
    """Shifts scenes so that a CROP x CROP window shows an object (or, for a fifth, anything)."""
    n, dev = len(vec), vec.device
    count = (vec[:, 3::5] >= 0).sum(1)
    k = (torch.rand(n, device=dev, generator=gen) * count).long()
    centre = torch.stack([vec[:, 5::5].gather(1, k[:, None])[:, 0], vec[:, 6::5].gather(1, k[:, None])[:, 0]], 1)
    off = centre - CROP / 2 + torch.randn(n, 2, device=dev, generator=gen) * 28
    anywhere = torch.rand(n, 2, device=dev, generator=gen) * CROP
    off = torch.where(torch.rand(n, 1, device=dev, generator=gen) < 0.2, anywhere, off).round()
    out = vec.clone()
    out[:, 5::5] -= off[:, :1]
    out[:, 6::5] -= off[:, 1:]
    return out


class Pictures:
    """Batches of pictures in [-1, 1]: windows first, then whole pictures of every format."""

    def __init__(self, a, prod):
        self.a, self.prod, self.parts = a, prod, []
        self.gen = torch.Generator(a.device).manual_seed(a.seed)

    def next(self, whole):
        if not self.parts:
            _, fmt, arr = self.prod.next()
            vec = torch.from_numpy(arr).to(self.a.device)
            if whole:
                img, n = pixels_of(vec[: 8 * self.a.vae_batch // 4], fmt), max(1, self.a.vae_batch // 4)
            else:
                img, n = data.render(crop_vectors(vec, self.gen), CROP, CROP), self.a.vae_batch
            img = flat(img.round_().div_(127.5).sub_(1), self.a)
            self.parts = [p for p in img.split(n) if len(p) == min(n, len(img))]
        return self.parts.pop()


def vae_loss(vae, x, a):
    with cast(a):
        mean, logvar = vae.moments(x)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        y = vae.decoder(flat(z, a)).float()
    mse, l1 = F.mse_loss(y, x), F.l1_loss(y, x)
    kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
    return mse + 0.2 * l1 + 1e-4 * kl, torch.stack([mse, l1, kl, mean.std()]).detach()


def train_vae(a, log):
    prod = Producer(a, [("scene", 1.0)], 2 * a.workers)
    c = setup(a)
    vae = M.HunyuanImage3(c).init().vae.to(a.device)
    pictures = Pictures(a, prod)
    opt = VaeOptimiser(vae, a)
    params = opt.params
    ema = [p.detach().clone() for p in params]
    start, step, seen, since, whole = time.monotonic(), 0, 0, None, False
    budget = a.minutes * 60
    while True:
        done = (time.monotonic() - start) / budget
        if done >= 1:
            break
        if done > 0.72 and not whole:
            whole, pictures.parts = True, []
            torch.backends.cudnn.benchmark = False  # many picture sizes from here on
        x = pictures.next(whole)
        f = min(1, (step + 1) / 100) * (1.0 if done < 0.4 else max(0.02, (1 - done) / 0.6))
        loss, parts = vae_loss(vae, x, a)
        loss.backward()
        opt.step(a.vae_lr * f, a.vae_muon_lr * f)
        torch._foreach_lerp_(ema, [p.detach() for p in params], 1 - min(0.998, (step + 1) / (step + 20)))
        step, seen = step + 1, seen + len(x)
        if step % a.log_every == 0 or step in (1, 2, 10, 50):
            mse, l1, kl, std = parts.tolist()
            now = time.monotonic()
            rate = 0 if since is None else (step - since[0]) / (now - since[1])
            since = (step, now)
            log(f"vae step {step} {100 * done:.0f}% mse {mse:.5f} ({10 * math.log10(4 / mse):.1f} dB) l1 {l1:.4f} "
                f"kl {kl:.3f} std {std:.3f} {rate:.1f} steps/s whole {int(whole)}")
    prod.close()
    for p, e in zip(params, ema):
        p.data.copy_(e)
    for m in vae.modules():
        if isinstance(m, M.Conv):
            m.unflatten()
    finish_vae(vae, a, log, step, seen)


@torch.no_grad()
def finish_vae(vae, a, log, step, seen):
    vae.to(torch.bfloat16).float()  # the shipped precision: everything after sees the rounded weights
    zs = []
    for i, f in enumerate(data.FORMATS):
        vec = torch.from_numpy(data.scene_chunk(10**9 + i, min(256, a.chunk), f)).to(a.device)
        mean, logvar = vae.moments(flat(pixels_of(vec, f) / 127.5 - 1, a))
        zs.append((mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)).flatten())
    vae.scale = float(f"{1 / torch.cat(zs).std().item():.8g}")
    state = {k: v.bfloat16().cpu() for k, v in vae.state_dict().items()}
    torch.save({"vae": state, "scale": vae.scale, "steps": step, "pictures": seen}, os.path.join(a.out, "vae.pt"))
    log("vae done: steps", step, "pictures", seen, "scaling_factor", vae.scale, "psnr", psnr(vae, a, min(64, a.chunk)))


def load_vae(net, a):
    s = torch.load(os.path.join(a.out, "vae.pt"), map_location="cpu", weights_only=True)
    net.vae.load_state_dict({k: v.float() for k, v in s["vae"].items()})
    net.vae.scale = s["scale"]
    net.c["vae"]["scaling_factor"] = s["scale"]


# ------------------------------------------------------------------------------------ encoding


@torch.no_grad()
def encode(vae, img, a):
    """Pixels [B, 3, H, W] in [0, 255] -> scaled posterior samples, fp16."""
    out = []
    for part in img.split(512):
        with cast(a):
            mean, logvar = vae.moments(flat(part / 127.5 - 1, a))
        out.append(((mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)) * vae.scale).half())
    return torch.cat(out)


def vit_pixels(img):
    """256 x 256 pictures -> uint8 patch rows [B, 64, 768] of the 128 x 128 antialiased picture."""
    small = F.interpolate(img.round(), (128, 128), mode="bilinear", align_corners=False, antialias=True)
    small = small.round().clamp(0, 255).to(torch.uint8)
    p = small.view(-1, 3, 8, 16, 8, 16).permute(0, 2, 4, 3, 5, 1)
    return p.reshape(-1, 64, 768)


class Pool:
    """Encoded scenes on the device, grown chunk by chunk, drawn from at random."""

    def __init__(self, a, vae):
        self.a, self.vae, self.rows, self.total = a, vae, {}, 0

    def add(self, kind, fmt, arrays):
        name = kind if kind == "edit" else fmt
        t = [torch.from_numpy(x).to(self.a.device) for x in arrays]
        vec = t[0]
        if kind == "edit":
            half = data.SCENE_FLOATS
            src, dst = pixels_of(vec[:, :half], fmt), pixels_of(vec[:, half:], fmt)
            row = [encode(self.vae, src, self.a), encode(self.vae, dst, self.a), vit_pixels(src), *t[1:]]
        else:
            n, v = len(vec), len(t[1]) // len(vec)
            row = [encode(self.vae, pixels_of(vec, fmt), self.a), *(x.view(n, v, *x.shape[1:]) for x in t[1:])]
        self.rows.setdefault(name, []).append(row)
        self.total += len(vec)

    def draw(self, name, count, gen):
        """Rows drawn chunk-wise: `count` split over a few random chunks, random rows in each."""
        chunks = self.rows[name]
        parts = min(8, count)
        out = []
        for i in range(parts):
            row = chunks[torch.randint(len(chunks), (1,), generator=gen).item()]
            n = count // parts + (i < count % parts)
            idx = torch.randint(len(row[0]), (n,), generator=gen).to(self.a.device)
            picked = [x[idx] for x in row]
            if name != "edit":
                var = torch.randint(row[1].shape[1], (n,), generator=gen).to(self.a.device)
                picked[1:] = [x[torch.arange(n, device=self.a.device), var] for x in picked[1:]]
            out.append(picked)
        return [torch.cat(x) for x in zip(*out)]


# ------------------------------------------------------------------------------------- batches


def put(x, where, value):
    """x [B, S, H] with the rows of mask `where` [B, S] replaced by value [B, H]."""
    return torch.where(where[..., None], value[:, None].to(x.dtype), x)


def assemble_t2i(net, ids, lens, noisy, t):
    """Embeddings and geometry of [text slots | image slots]; returns x, cos, sin, order, span."""
    b, slots = ids.shape
    h, w = noisy.shape[-2:]
    dev = ids.device
    at = torch.arange(slots, device=dev)[None]
    lens = lens.long()[:, None]
    x = net.model.wte(ids.long())
    x = put(x, at == lens - 1, net.timestep_emb(t))
    img = net.patch_embed(noisy, net.time_embed(t)).to(x.dtype)
    tail = IMAGE_SLOTS - h * w
    img = F.pad(img, (0, 0, 0, tail))
    order = torch.where(at < lens, at, -1)
    n = torch.arange(IMAGE_SLOTS, device=dev)[None]
    img_order = torch.where(n < h * w, lens + n, -1)
    pos = torch.stack([at, at], -1).float().expand(b, -1, -1)
    img_pos = F.pad(M.image_positions(lens[:, 0], h, w), (0, 0, 0, tail))
    span = torch.cat([torch.zeros_like(order), (img_order >= 0).long()], 1)
    cos, sin = M.rope_table(torch.cat([pos, img_pos], 1), net.c["attention_head_dim"])
    return torch.cat([x, img], 1), cos, sin, torch.cat([order, img_order], 1), span


def assemble_edit(net, sep_id, eoi_id, cond, vit, pre, pre_len, post, post_len, noisy, t, vit_grid=(8, 8), slots=EDIT_SLOTS):
    """Like `assemble_t2i` with one conditioning picture (VAE and ViT tokens in one full span)."""
    b, dev = len(cond), cond.device
    zero = torch.zeros(b, device=dev)
    lp, lt = pre_len.long()[:, None], post_len.long()[:, None]
    ap, at = torch.arange(pre.shape[1], device=dev)[None], torch.arange(post.shape[1], device=dev)[None]
    xp = put(net.model.wte(pre.long()), ap == lp - 1, net.timestep_emb(zero))
    xt = put(net.model.wte(post.long()), at == lt - 1, net.timestep_emb(t))
    dt = xp.dtype
    xv = net.patch_embed(cond, net.time_embed(zero)).to(dt)
    xi = net.vision_aligner(net.vision_model(vit, *vit_grid)).to(dt)
    xg = net.patch_embed(noisy, net.time_embed(t)).to(dt)
    sep = net.model.wte(torch.full((b, 1), sep_id, device=dev))
    eoi = net.model.wte(torch.full((b, 1), eoi_id, device=dev))
    nv, ni = xv.shape[1], xi.shape[1]
    g0 = lp + nv + ni + 2  # index of the first token after the cond image's <eoi>
    (ch, cw), (gh, gw), nr = cond.shape[-2:], noisy.shape[-2:], vit_grid[0] * vit_grid[1]
    lin = lambda o: torch.stack([o, o], -1).float()  # noqa: E731
    line = lambda n: torch.arange(n, device=dev)[None]  # noqa: E731
    vit_at = lp + nv + 1 + line(ni)
    vit_pos = torch.cat([M.image_positions(lp[:, 0] + nv + 1, *vit_grid), lin(vit_at[:, nr:])], 1)
    parts = [
        (xp, torch.where(ap < lp, ap, -1).expand(b, -1), 0, None),
        (xv, lp + line(nv), 1, M.image_positions(lp[:, 0], ch, cw)),
        (sep, lp + nv, 1, None),
        (xi, vit_at, 1, vit_pos),
        (eoi, g0 - 1, 0, None),
        (xt, torch.where(at < lt, g0 + at, -1), 0, None),
        (xg, g0 + lt + line(xg.shape[1]), 2, M.image_positions((g0 + lt)[:, 0], gh, gw)),
    ]
    fill = slots - sum(p[0].shape[1] for p in parts)
    parts.append((xp.new_zeros(b, fill, xp.shape[2]), torch.full((b, fill), -1, device=dev), 0, None))
    x = torch.cat([p[0] for p in parts], 1)
    order = torch.cat([p[1] for p in parts], 1)
    span = torch.cat([torch.full_like(p[1], p[2]) for p in parts], 1)
    pos = torch.cat([lin(p[1]) if p[3] is None else p[3] for p in parts], 1)
    cos, sin = M.rope_table(pos.clamp(min=0), net.c["attention_head_dim"])
    start = sum(p[0].shape[1] for p in parts[:6])
    return x, cos, sin, order, span, start


def bias(order, span, dtype):
    allow = M.attention_mask(order, span)
    return torch.zeros(allow.shape, dtype=dtype, device=order.device).masked_fill_(~allow, NEG)


def sample_sigma(n, gen_dev, shift=3.0):
    u = torch.rand(n, device=gen_dev)
    s = shift * u / (1 + (shift - 1) * u)
    plain = torch.rand(n, device=gen_dev) < 0.15
    return torch.where(plain, u, s).clamp(min=1e-3)


def noisy_pair(z):
    sigma = sample_sigma(len(z), z.device)
    noise = torch.randn_like(z)
    s = sigma[:, None, None, None]
    return (1 - s) * z + s * noise, noise - z, 1000 * sigma


def t2i_loss(net, a, rows, cfg_id):
    z, ids, flags, lens = rows
    z = z.float()
    drop = torch.rand(len(ids), device=ids.device) < a.cfg_drop
    teach = (flags & (data.TEACH | data.RATIO)) > 0
    teach = teach & ~drop[:, None]
    ids = torch.where(drop[:, None] & ((flags & data.DROP) > 0), torch.full_like(ids, cfg_id), ids)
    x_t, v, t = noisy_pair(z)
    with cast(a):
        x, cos, sin, order, span = assemble_t2i(net, ids, lens, x_t, t)
        dt = torch.bfloat16 if a.device == "cuda" else torch.float32
        y, aux = net.model(x.to(dt), cos, sin, bias(order, span, dt), (order >= 0).float())
        h, w = z.shape[-2:]
        slots = ids.shape[1]
        pred = net.final_layer(y[:, slots : slots + h * w], net.time_embed_2(t), h, w)
        logits = net.logits(y[:, : slots - 1])
    ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].long().flatten(), reduction="none")
    wt = teach[:, 1:].float().flatten()
    return F.mse_loss(pred, v), (ce * wt).sum() / wt.sum().clamp(min=1), aux


def edit_loss(net, a, rows, special):
    src, dst, vit, pre, _, pre_len, post, post_flags, post_len = rows
    drop = torch.rand(len(src), device=src.device) < a.cfg_drop
    post = torch.where(drop[:, None] & ((post_flags & data.DROP) > 0), torch.full_like(post, special["<cfg>"]), post)
    x_t, v, t = noisy_pair(dst.float())
    with cast(a):
        x, cos, sin, order, span, start = assemble_edit(
            net, special["<joint_img_sep>"], special["<eoi>"], src.float(), vit.float() / 127.5 - 1,
            pre, pre_len, post, post_len, x_t, t,
        )  # fmt: skip
        dt = torch.bfloat16 if a.device == "cuda" else torch.float32
        y, aux = net.model(x.to(dt), cos, sin, bias(order, span, dt), (order >= 0).float())
        pred = net.final_layer(y[:, start : start + IMAGE_SLOTS], net.time_embed_2(t), 16, 16)
    return F.mse_loss(pred, v), torch.zeros((), device=src.device), aux


# --------------------------------------------------------------------------------------- joint


def save_joint(a, net, ema, names, adam, muon, step, spent, seen):
    path = os.path.join(a.out, "joint.pt")
    state = {
        "net": {k: v for k, v in net.state_dict().items() if not k.startswith("vae.")},
        "ema": dict(zip(names, ema)), "adam": adam.state_dict(), "muon": muon.state if muon else None,
        "step": step, "spent": spent, "seen": seen, "scale": net.vae.scale,
    }  # fmt: skip
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_joint(a, net, ema, adam, muon, names):
    s = torch.load(os.path.join(a.out, "joint.pt"), map_location=a.device, weights_only=True)
    net.load_state_dict(s["net"], strict=False)
    for e, n in zip(ema, names):
        e.copy_(s["ema"][n])
    adam.load_state_dict(s["adam"])
    if muon:
        for mine, theirs in zip(muon.state, s["muon"]):
            for m, t in zip(mine, theirs):
                m.copy_(t)
    return s["step"], s["spent"], s["seen"]


def train_joint(a, log):
    prod = Producer(a, [("t2i", 0.86), ("edit", 0.14)] if a.edits else [("t2i", 1.0)], 6 * a.workers)
    c = setup(a)
    net = M.HunyuanImage3(c).init()
    load_vae(net, a)
    net.to(a.device)
    for p in net.vae.parameters():
        p.requires_grad_(False)
    special = _specials(a)
    train, adam, muon = make_optimisers(net, a)
    names = [n for n, _ in net.named_parameters() if not n.startswith("vae.")]
    ema = [p.detach().clone() for p in train]
    step, spent, seen = 0, 0.0, 0
    if a.resume:
        step, spent, seen = load_joint(a, net, ema, adam, muon, names)
        log("resumed at step", step, "after", round(spent), "s")
    if a.compile:
        for layer in net.model.layers:
            layer.compile(dynamic=False)
    gen = torch.Generator().manual_seed(a.seed + step)
    torch.manual_seed(a.seed + 1 + step)
    pool = Pool(a, net.vae)
    t0 = time.monotonic()
    want = set(FORMAT_WEIGHTS) | ({"edit"} if a.edits else set())
    while pool.total < a.pool_start or want - set(pool.rows):
        pool.add(*prod.next())
    log(f"pool of {pool.total} scenes, {pool.total / (time.monotonic() - t0):.0f} scenes/s")
    start, window, since, saved = time.monotonic(), [], time.monotonic(), time.monotonic()
    budget = a.minutes * 60
    pick = random.Random(a.seed + step)
    edit_seen, mark = 0, seen
    while True:
        now = spent + time.monotonic() - start
        done = now / budget
        if done >= 1 or (a.max_steps and step >= a.max_steps):
            break
        if pool.total < a.pool_cap and step % a.pool_every == 0:
            pool.add(*prod.next())
        edit = a.edits and done > a.edit_from and pick.random() < a.edit_share
        if edit:
            n = a.batch // 2
            mse, ce, aux = edit_loss(net, a, pool.draw("edit", n, gen), special)
            edit_seen += n
        else:
            n = a.batch
            fmt = pick.choices(*zip(*FORMAT_WEIGHTS.items()))[0]
            mse, ce, aux = t2i_loss(net, a, pool.draw(fmt, n, gen), special["<cfg>"])
        loss = mse + a.ce_weight * ce + a.aux_weight * aux
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(train, 1.0)
        f = lr_factor(step, done)
        for g in adam.param_groups:
            g["lr"] = a.lr * f
        adam.step()
        if muon:
            muon.step(a.muon_lr * f)
        net.zero_grad(set_to_none=True)
        decay = min(a.ema, (step + 1) / (step + 20))
        torch._foreach_lerp_(ema, [p.detach() for p in train], 1 - decay)
        step, seen = step + 1, seen + n
        window.append((edit, torch.stack([mse.detach(), ce.detach(), aux.detach(), norm.detach()])))
        if step % a.log_every == 0 or step in (1, 2, 5, 20):
            _report(log, a, window, step, done, seen - mark, time.monotonic() - since, pool, f)
            window, mark, since = [], seen, time.monotonic()
        if time.monotonic() - saved > a.save_every:
            save_joint(a, net, ema, names, adam, muon, step, spent + time.monotonic() - start, seen)
            saved = time.monotonic()
    prod.close()
    save_joint(a, net, ema, names, adam, muon, step, spent + time.monotonic() - start, seen)
    log(f"joint done: steps {step} samples {seen} of them edits {edit_seen} seconds {spent + time.monotonic() - start:.0f}")


def _report(log, a, window, step, done, n, dt, pool, f):
    vals = torch.stack([v for e, v in window if not e] or [window[-1][1]]).mean(0).tolist()
    edits = [v for e, v in window if e]
    text = f"joint step {step} {100 * done:.1f}% mse {vals[0]:.4f} ce {vals[1]:.4f} aux {vals[2]:.3f} norm {vals[3]:.2f}"
    if edits:
        text += f" edit-mse {torch.stack(edits).mean(0)[0].item():.4f}"
    mem = torch.cuda.max_memory_allocated() / 2**30 if a.device == "cuda" else 0
    log(f"{text} {n / dt:.0f} samples/s pool {pool.total} lr x{f:.2f} mem {mem:.0f} GiB")


def _specials(a):
    from tokenizers import Tokenizer

    tk = Tokenizer.from_file(os.path.join(a.assets, "tokenizer.json"))
    return {n: tk.token_to_id(n) for n in ("<cfg>", "<joint_img_sep>", "<eoi>")}


# -------------------------------------------------------------------------------------- export


def export(a, log):
    """EMA weights as bf16 shards (router fp32) with the real names; copies tokenizer and configs."""
    from safetensors.torch import save_file

    c = setup(argparse.Namespace(**{**vars(a), "device": "cpu"}))
    net = M.HunyuanImage3(c)
    load_vae(net, a)
    s = torch.load(os.path.join(a.out, "joint.pt"), map_location="cpu", weights_only=True)
    missing = net.load_state_dict(s["ema"], strict=False).missing_keys
    assert all(k.startswith("vae.") for k in missing), missing[:3]
    net.vae.inflate()
    os.makedirs(a.checkpoint, exist_ok=True)
    tensors = {}
    for name, t in sorted(M.to_checkpoint(net).items()):
        tensors[name] = t.float().contiguous() if name.endswith("gate.wg.weight") else t.bfloat16().contiguous()
    shards, size = [{}], 0
    for name, t in tensors.items():
        n = t.numel() * t.element_size()
        if size + n > 11_500_000:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += n
    index, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:04d}-of-{len(shards):04d}.safetensors"
        save_file(shard, os.path.join(a.checkpoint, file), metadata={"format": "pt"})
        index.update({k: file for k in shard})
        total += sum(t.numel() * t.element_size() for t in shard.values())
    with open(os.path.join(a.checkpoint, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, f, indent=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        with open(os.path.join(a.assets, name), "rb") as f:
            content = f.read()
        with open(os.path.join(a.checkpoint, name), "wb") as f:
            f.write(content)
    with open(os.path.join(a.checkpoint, "config.json"), "w") as f:
        json.dump(c, f, indent=1)
        f.write("\n")
    log("exported", len(tensors), "tensors,", total, "bytes,", len(shards), "shards to", a.checkpoint)


def smoke(a, log):
    """Every phase at toy size; proves that the command lines, the resume and the export work."""
    a.device, a.compile, a.workers, a.chunk = "cpu", 0, 1, 2
    a.kernel = 0
    a.vae_batch, a.batch, a.log_every, a.pool_start, a.pool_cap = 2, 2, 2, 4, 4
    a.minutes = 0.15
    train_vae(a, log)
    a.minutes, a.edit_from, a.edit_share = 60, 0.0, 0.4
    for steps, resume in ((4, False), (8, True)):
        a.max_steps, a.resume = steps, resume
        train_joint(a, log)
    export(a, log)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("phase", choices=["vae", "joint", "export", "smoke"])
    p.add_argument("--out", required=True)
    p.add_argument("--assets", default=os.path.join(HERE, "checkpoint"))
    p.add_argument("--checkpoint", default=os.path.join(HERE, "checkpoint"))
    p.add_argument("--minutes", type=float, default=4.0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--compile", type=int, default=1)
    p.add_argument("--kernel", type=int, default=1, help="the fused norm kernel (GPU only)")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--chunk", type=int, default=1024)
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--vae-batch", type=int, default=96)
    p.add_argument("--vae-lr", type=float, default=1.5e-3)
    p.add_argument("--vae-muon-lr", type=float, default=3e-3)
    p.add_argument("--batch", type=int, default=512)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--muon", type=int, default=1)
    p.add_argument("--muon-lr", type=float, default=2e-3)
    p.add_argument("--ema", type=float, default=0.998)
    p.add_argument("--cfg-drop", type=float, default=0.12)
    p.add_argument("--ce-weight", type=float, default=0.15)
    p.add_argument("--aux-weight", type=float, default=0.01)
    p.add_argument("--edits", type=int, default=1)
    p.add_argument("--edit-from", type=float, default=0.3)
    p.add_argument("--edit-share", type=float, default=0.12)
    p.add_argument("--pool-start", type=int, default=40_000)
    p.add_argument("--pool-cap", type=int, default=400_000)
    p.add_argument("--pool-every", type=int, default=2)
    p.add_argument("--save-every", type=float, default=150.0)
    p.add_argument("--max-steps", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


if __name__ == "__main__":
    args = arguments()
    logger = Log(args.out)
    logger(" ".join(sys.argv))
    {"vae": train_vae, "joint": train_joint, "export": export, "smoke": smoke}[args.phase](args, logger)
