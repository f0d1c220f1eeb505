"""Checks model.py against the recorded numbers of the official code (float32 tolerances).

Run: python test_golden.py [golden folder]
"""

import glob
import json
import os
import sys

import torch
from safetensors.torch import load_file

from model import HunyuanImage3, Vae, attention_mask, from_checkpoint, image_positions, rope_table

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../../integration-tests/fixtures/golden")


def load_model():
    with open(f"{GOLDEN}/model/config.json") as f:
        model = HunyuanImage3(json.load(f))
    tensors = {}
    for shard in sorted(glob.glob(f"{GOLDEN}/model/*.safetensors")):
        tensors.update(load_file(shard))
    return from_checkpoint(model, tensors).eval()


def close(name, got, want, limit):
    worst = (got.float() - want.float()).abs().max().item()
    print(f"{'ok  ' if worst <= limit else 'FAIL'} {name}: largest difference {worst:.2e} (limit {limit:.0e})")
    assert worst <= limit, name


def diffuse(m, ids, latents, t, start):
    """Whole-sequence prediction for rows ids [B, S] whose image span starts at `start`."""
    b, s = ids.shape
    h, w = latents.shape[-2:]
    n = h * w
    x = m.model.wte(ids.long()).clone()
    t = t.expand(b)
    x[:, start : start + n] = m.patch_embed(latents, m.time_embed(t))
    x[:, start - 1] = m.timestep_emb(t)
    order = torch.arange(s)[None].expand(b, s).clone()
    span = torch.zeros_like(order)
    span[:, start : start + n] = 1
    pos = torch.stack([order, order], -1).float()
    pos[:, start : start + n] = image_positions(torch.full((b,), start), h, w)
    cos, sin = rope_table(pos, m.c["attention_head_dim"])
    y, _ = m.model(x, cos, sin, attention_mask(order, span))
    return m.final_layer(y[:, start : start + n], m.time_embed_2(t), h, w), x


def test_prefill(m):
    g = load_file(f"{GOLDEN}/02_prefill_t2i.safetensors")
    ids = g["step0.input_ids"]
    start = int((ids[0] == m.c["image_token_id"]).nonzero()[0])
    lat = g["step0.latents"].expand(2, -1, -1, -1)
    pred, x = diffuse(m, ids, lat, g["step0.timestep"], start)
    close("02 embeds", x, g["step0.inputs_embeds"], 1e-4)
    close("02 step 0 prediction", pred, g["step0.pred"], 1e-4)
    pred, _ = diffuse(m, ids, g["step1.latents"].expand(2, -1, -1, -1), g["step1.timestep"], start)
    close("02 step 1 prediction", pred, g["step1.pred"], 1e-4)


def text_logits(m, ids):
    s = ids.shape[1]
    order = torch.arange(s)[None]
    cos, sin = rope_table(torch.stack([order, order], -1), m.c["attention_head_dim"])
    y, _ = m.model(m.model.wte(ids.long()), cos, sin, attention_mask(order, torch.zeros_like(order)))
    return m.logits(y)


def test_text(m):
    g = load_file(f"{GOLDEN}/02_prefill_text.safetensors")
    close("02 text logits", text_logits(m, g["input_ids"]), g["logits"], 1e-4)
    g = load_file(f"{GOLDEN}/06_ar_text.safetensors")
    for case in ("auto", "recaption", "think"):
        ids, new = g[f"{case}.prompt_ids"], g[f"{case}.new_ids"]
        full = torch.cat([ids, new])[None]
        got = text_logits(m, full)[0, len(ids) - 1 : -1]
        close(f"06 {case} logits", got, g[f"{case}.logits_uncached"], 1e-4)
        assert got.argmax(-1).tolist() == new.tolist(), case


def test_denoise(m):
    shift = 3.0
    for case, steps in (("1x1_4steps", 4), ("9x16_4steps", 4)):
        g = load_file(f"{GOLDEN}/03_denoise_{case}.safetensors")
        with open(f"{GOLDEN}/01_layouts.json") as f:
            rows = [r for r in json.load(f)]
        with open(f"{GOLDEN}/03_denoise.json") as f:
            spec = json.load(f)[case]
        row = next((r for r in rows if r["inputs"].get("prompt") == spec["prompt"] and r["seq_len"] == spec["seq_len"]
                    and r["inputs"].get("mode") == "gen_image"), None)
        s = 1 - torch.arange(steps + 1, dtype=torch.float32) / steps
        sigma = shift * s / (1 + (shift - 1) * s)
        close(f"03 {case} sigmas", sigma, g["sigmas"], 1e-6)
        if row is None:
            continue
        ids = load_file(f"{GOLDEN}/01_layouts.safetensors")[f"{row['id']}.tokens"]
        start = row["gen_image_slices"][0][0][0]
        x = g["init_latents"]
        for i in range(steps):
            pred, _ = diffuse(m, ids, x.expand(2, -1, -1, -1), 1000 * sigma[i : i + 1], start)
            guided = pred[1] + spec["guidance_scale"] * (pred[0] - pred[1])
            close(f"03 {case} step {i} guided", guided, g["pred_guided"][i, 0], 5e-3)
            x = x + (sigma[i + 1] - sigma[i]) * guided
        close(f"03 {case} final latents", x, g["final_latents"], 5e-3)


def test_vae(m):
    g = load_file(f"{GOLDEN}/04_vae.safetensors")
    for k in ("dec0", "dec1"):
        close(f"04 {k}", m.vae.decoder(g[f"{k}.z"]), g[f"{k}.sample_all_t"], 1e-4)
    for k in ("enc0", "enc1"):
        mean, logvar = m.vae.moments(g[f"{k}.x"][:, :, None].expand(-1, -1, 4, -1, -1))
        close(f"04 {k} mean", mean, g[f"{k}.mean"], 1e-4)
        close(f"04 {k} logvar", logvar, g[f"{k}.logvar"], 1e-4)


def test_vit(m):
    g = load_file(f"{GOLDEN}/04_vit.safetensors")
    for i in range(2):
        h, w = g[f"img{i}.vit_spatial_shapes"][0].tolist()
        y = m.vision_model(g[f"img{i}.vit_pixel_values"], h, w)
        close(f"04 vit img{i}", y, g[f"img{i}.vit_last_hidden_state"], 1e-4)
        close(f"04 aligner img{i}", m.vision_aligner(y), g[f"img{i}.vit_aligned"], 1e-4)


def test_training_layout(m):
    """The trainer's free storage order gives the same predictions as the official sequences."""
    import train

    g = load_file(f"{GOLDEN}/02_prefill_t2i.safetensors")
    ids = g["step0.input_ids"].long()
    start = int((ids[0] == m.c["image_token_id"]).nonzero()[0])
    text = torch.full((2, 96), m.c["pad_token_id"])
    text[:, :start] = ids[:, :start]
    t = g["step0.timestep"].expand(2)
    x, cos, sin, order, span = train.assemble_t2i(m, text, torch.full((2,), start), g["step0.latents"].expand(2, -1, -1, -1), t)
    y, _ = m.model(x, cos, sin, train.bias(order, span, torch.float32))
    pred = m.final_layer(y[:, 96 : 96 + 192], m.time_embed_2(t), 24, 8)
    close("02 in the training layout", pred, g["step0.pred"], 1e-4)

    g = load_file(f"{GOLDEN}/09_cond.safetensors")
    ids = g["tokens"].long()
    cond = g["cond_vae_latents_scaled"]
    eoi = (ids[0] == m.c["im_end_id"]).nonzero()[:, 0].tolist()
    img = (ids[0] == m.c["image_token_id"]).nonzero()[:, 0].tolist()
    lp, sep = img[0], int(ids[0, img[0] + cond.shape[-1] * cond.shape[-2]])
    gen0 = next(i for i in img if i > eoi[0])
    pre, post = ids[:, :lp], ids[:, eoi[0] + 1 : gen0]
    v = load_file(f"{GOLDEN}/04_vit.safetensors")
    grid = tuple(v["img0.vit_spatial_shapes"][0].tolist())
    t = g["timesteps"][:1].expand(2)
    x, cos, sin, order, span, at = train.assemble_edit(
        m, sep, m.c["im_end_id"], cond, v["img0.vit_pixel_values"].expand(2, -1, -1), pre, torch.full((2,), pre.shape[1]),
        post, torch.full((2,), post.shape[1]), g["init_latents"].expand(2, -1, -1, -1), t, grid, 560,
    )  # fmt: skip
    y, _ = m.model(x, cos, sin, train.bias(order, span, torch.float32))
    pred = m.final_layer(y[:, at : at + 192], m.time_embed_2(t), 24, 8)
    close("09 conditional row", pred[0], g["pred_cond"][0, 0], 1e-3)
    close("09 unconditional row", pred[1], g["pred_uncond"][0, 0], 1e-3)


def test_flat_vae():
    """Training without frames equals the 3-D network once `inflate` has been applied."""
    torch.manual_seed(1)
    v = {"in_channels": 3, "out_channels": 3, "latent_channels": 16, "block_out_channels": [32, 32, 32, 64, 64],
         "layers_per_block": 1, "ffactor_spatial": 16, "ffactor_temporal": 4, "scaling_factor": 1.0}  # fmt: skip
    vae = Vae(v)
    vae.inflate()
    x = torch.rand(1, 3, 64, 96) * 2 - 1
    frames = x[:, :, None].expand(-1, -1, 4, -1, -1)
    close("flat encoder", vae.encoder(x), vae.encoder(frames)[:, :, 0], 1e-4)
    z = torch.randn(1, 16, 4, 6)
    all_t = vae.decoder(z[:, :, None])
    close("flat decoder", vae.decoder(z), all_t[:, :, -1], 1e-4)
    close("equal frames", all_t[:, :, 0], all_t[:, :, -1], 1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        net = load_model()
        test_prefill(net)
        test_text(net)
        test_denoise(net)
        test_vae(net)
        test_vit(net)
        test_training_layout(net)
        test_flat_vae()
