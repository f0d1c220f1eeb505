"""Draws the held-out prompts with an exported checkpoint and scores them with the checker.

    python evaluate.py CHECKPOINT --out FOLDER [--steps 16] [--guidance 4] [--modes cfg,instruct,edit]
    python evaluate.py CHECKPOINT --prompt "a red circle left of a blue square" --out FOLDER

Writes scores.json (per category, with every failure) and pictures.npz; the network runs in float32
on bfloat16 weights, as the CPU path of the serving system does.
"""

import argparse
import collections
import concurrent.futures as futures
import glob
import json
import os

import numpy as np
import torch

import check
import data
import model as M
import train as T


def load(folder, device):
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    with open(os.path.join(folder, "config.json")) as f:
        net = M.HunyuanImage3(json.load(f))
    tensors = {}
    for shard in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        tensors.update(load_file(shard))
    M.from_checkpoint(net, tensors)
    return net.to(device).eval(), data.Rows(Tokenizer.from_file(os.path.join(folder, "tokenizer.json")))


def pad(seqs, fill, dev):
    n = max(map(len, seqs))
    n += -n % 8
    ids = torch.full((len(seqs), n), fill)
    for i, s in enumerate(seqs):
        ids[i, : len(s)] = torch.tensor(s)
    return ids.to(dev), torch.tensor([len(s) for s in seqs], device=dev)


@torch.no_grad()
def next_logits(net, rows, seqs, dev):
    ids, lens = pad(seqs, rows.pad, dev)
    at = torch.arange(ids.shape[1], device=dev)[None]
    order = torch.where(at < lens[:, None], at, -1)
    cos, sin = M.rope_table(torch.stack([at, at], -1), net.c["attention_head_dim"])
    cos, sin = (v.expand(len(ids), -1, -1) for v in (cos, sin))
    y, _ = net.model(net.model.wte(ids), cos, sin, T.bias(order, torch.zeros_like(order), torch.float32))
    return net.logits(y[torch.arange(len(ids), device=dev), lens - 1])


def ratio_ids(rows):
    return torch.tensor([rows.ratio(k) for k in range(37)])


@torch.no_grad()
def pick_ratio(net, rows, seqs, dev):
    """Greedy ratio index after `<boi><img_size_256>` for each row."""
    tail = [rows.special("<boi>"), rows.special("<img_size_256>")]
    lg = next_logits(net, rows, [s + tail for s in seqs], dev)
    return lg[:, ratio_ids(rows).to(dev)].argmax(-1).tolist()


@torch.no_grad()
def write_cot(net, rows, prompts, dev, limit=90):
    """Greedy think and recaption text for instruct prompts; returns (think, recaption, ratio index)."""
    start = rows.ids("User: "), rows.ids("\n\n") + rows.ids("Assistant: ") + [rows.special("<think>")]
    seqs = [[rows.special("<|startoftext|>")] + start[0] + rows.ids(p) + start[1] for p in prompts]
    base = [len(s) for s in seqs]
    end_think, open_recap, end = (rows.special(n) for n in ("</think>", "<recaption>", "</recaption>"))
    live = set(range(len(seqs)))
    for _ in range(limit):
        if not live:
            break
        rowsel = sorted(live)
        best = next_logits(net, rows, [seqs[i] for i in rowsel], dev).argmax(-1).tolist()
        for i, b in zip(rowsel, best):
            seqs[i].append(b)
            if b == end_think and open_recap not in seqs[i][base[i] :]:
                seqs[i].append(open_recap)
            elif b == end:
                live.discard(i)
    out = []
    ratios = pick_ratio(net, rows, [s + [rows.special("<answer>")] for s in seqs], dev)
    for s, b, k in zip(seqs, base, ratios):
        body = s[b:]
        think = body[: body.index(end_think)] if end_think in body else body
        rest = body[body.index(open_recap) + 1 :] if open_recap in body else []
        recap = [t for t in rest if t != end]
        out.append((rows.tk.decode(think), rows.tk.decode(recap), k))
    return out


def cfg_row(seq, rows):
    return [rows.special("<cfg>") if f & data.DROP else i for i, f in seq]


def sigmas(steps, shift=3.0):
    s = 1 - torch.arange(steps + 1, dtype=torch.float32) / steps
    return shift * s / (1 + (shift - 1) * s)


def solve(predict, noise, steps, guidance):
    """Euler from noise to picture; predict(x, t) -> (cond, uncond)."""
    sg, x = sigmas(steps), noise
    for i in range(steps):
        c, u = predict(x, 1000 * sg[i])
        x = x + (sg[i + 1] - sg[i]) * (u + guidance * (c - u))
    return x


@torch.no_grad()
def draw(net, rows, seqs, k, a, seed=0):
    """Pictures uint8 [B, H, W, 3] for token rows (id, flag) of one bucket."""
    h, w = (v // 16 for v in data.BUCKETS[k])
    dev = a.device
    both = [[i for i, _ in s] for s in seqs] + [cfg_row(s, rows) for s in seqs]
    ids, lens = pad(both, rows.pad, dev)

    def predict(x, t):
        xx = torch.cat([x, x])
        tt = t.to(dev).expand(len(xx))
        e, cos, sin, order, span = T.assemble_t2i(net, ids, lens, xx, tt)
        y, _ = net.model(e, cos, sin, T.bias(order, span, torch.float32))
        n = ids.shape[1]
        return net.final_layer(y[:, n : n + h * w], net.time_embed_2(tt), h, w).chunk(2)

    gen = torch.Generator().manual_seed(a.seed + seed)
    noise = torch.randn(len(seqs), net.c["vae"]["latent_channels"], h, w, generator=gen).to(dev)
    z = solve(predict, noise, a.steps, a.guidance)
    return net.vae.decode_u8(z, flat=not a.frames).cpu().numpy()


@torch.no_grad()
def edit(net, rows, entries, a):
    """(before, after) pictures for edit entries, pretrain template, 256 x 256."""
    dev = a.device
    vec = torch.tensor([e["source"]["vector"] for e in entries])
    before = data.render(vec, 256, 256).round().clamp(0, 255).to(dev)
    torch.manual_seed(a.seed)
    mean, logvar = net.vae.moments(before / 127.5 - 1)
    cond = (mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)) * net.vae.scale
    vit = T.vit_pixels(before).float() / 127.5 - 1
    parts = [data.edit_sections(rows, "pretrain", e["prompt"]) for e in entries]
    pre, pl = pad([[i for i, _ in p] for p, _ in parts] * 2, rows.pad, dev)
    post, ql = pad([[i for i, _ in q] for _, q in parts] + [cfg_row(q, rows) for _, q in parts], rows.pad, dev)
    sep, eoi = rows.special("<joint_img_sep>"), rows.special("<eoi>")

    def predict(x, t):
        xx, tt = torch.cat([x, x]), t.to(dev).expand(2 * len(x))
        e, cos, sin, order, span, start = T.assemble_edit(
            net, sep, eoi, torch.cat([cond, cond]), torch.cat([vit, vit]), pre, pl, post, ql, xx, tt
        )
        y, _ = net.model(e, cos, sin, T.bias(order, span, torch.float32))
        return net.final_layer(y[:, start : start + 256], net.time_embed_2(tt), 16, 16).chunk(2)

    gen = torch.Generator().manual_seed(a.seed)
    noise = torch.randn(len(entries), cond.shape[1], 16, 16, generator=gen).to(dev)
    after = net.vae.decode_u8(solve(predict, noise, a.steps, a.guidance), flat=not a.frames)
    return before.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy(), after.cpu().numpy()


# ------------------------------------------------------------------------------------- scores


def _judge(job):
    return check.judge(check.read(job[0]), job[1])


def _judge_edit(job):
    before, after, e = job
    return check.judge_edit(check.read(before), check.read(after), e["source"], e)


def by_bucket(items, key):
    groups = collections.defaultdict(list)
    for i, x in enumerate(items):
        groups[key(x)].append(i)
    return groups


def tally(name, entries, wrong, scores, failures):
    count = collections.Counter(e["category"] for e in entries)
    right = collections.Counter(e["category"] for e, w in zip(entries, wrong) if not w)
    scores[name] = {c: f"{right[c]}/{n}" for c, n in count.items()}
    failures[name] = {e["id"]: [e["prompt"], w[0]] for e, w in zip(entries, wrong) if w}


def draw_all(net, rows, entries, texts, ks, a):
    pictures = [None] * len(entries)
    for k, idx in by_bucket(ks, lambda k: k).items():
        for part in (idx[i : i + a.batch] for i in range(0, len(idx), a.batch)):
            for i, img in zip(part, draw(net, rows, [texts[i](k) for i in part], k, a, seed=part[0])):
                pictures[i] = img
    return pictures


def run_cfg(net, rows, entries, a, pool, scores, failures):
    wanted = [data.FORMATS[e["format"]] for e in entries]
    bos = rows.special("<|startoftext|>")
    ratio = pick_ratio(net, rows, [[bos] + rows.ids(e["prompt"]) for e in entries], a.device)
    texts = [lambda k, e=e: rows.text_to_image("pretrain", e["prompt"], k) for e in entries]
    pictures = draw_all(net, rows, entries, texts, wanted, a)
    tally("cfg", entries, list(pool.map(_judge, [(p, e["expect"]) for p, e in zip(pictures, entries)])), scores, failures)
    tally("ratio token", entries, [[] if r == k else [f"{r} not {k}"] for r, k in zip(ratio, wanted)], scores, failures)
    return pictures


def run_instruct(net, rows, entries, a, pool, scores, failures):
    cot = write_cot(net, rows, [e["prompt"] for e in entries], a.device)
    wanted = [data.FORMATS[e["format"]] for e in entries]
    wrong = []
    for e, (_, recap, _) in zip(entries, cot):
        lost = [o for o in e["expect"]["objects"] if f"{o['colour']} {o['shape']}" not in recap]
        wrong.append([f"{recap!r} lacks {lost}"] if lost else [])
    tally("recaption objects", entries, wrong, scores, failures)
    tally("instruct ratio token", entries, [[] if c[2] == k else [f"{c[2]} not {k}"] for c, k in zip(cot, wanted)],
          scores, failures)  # fmt: skip
    texts = [lambda k, e=e, c=c: rows.text_to_image("instruct", e["prompt"], k, c[0], c[1]) for e, c in zip(entries, cot)]
    pictures = draw_all(net, rows, entries, texts, wanted, a)
    tally("instruct", entries, list(pool.map(_judge, [(p, e["expect"]) for p, e in zip(pictures, entries)])), scores, failures)
    return pictures, cot


def run_edit(net, rows, entries, a, pool, scores, failures):
    before, after = [], []
    for i in range(0, len(entries), a.batch):
        b, c = edit(net, rows, entries[i : i + a.batch], a)
        before += list(b)
        after += list(c)
    tally("edit", entries, list(pool.map(_judge_edit, list(zip(before, after, entries)))), scores, failures)
    return before, after


def grid(path, pictures, labels, columns, cell=150):
    """Contact sheet with the prompts under the pictures."""
    import textwrap

    from PIL import Image, ImageDraw

    text_h = 46
    rows_n = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (cell + 6), rows_n * (cell + text_h)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (p, label) in enumerate(zip(pictures, labels)):
        im = Image.fromarray(p)
        im.thumbnail((cell, cell), Image.LANCZOS)
        x, y = (i % columns) * (cell + 6) + 3, (i // columns) * (cell + text_h)
        sheet.paste(im, (x + (cell - im.width) // 2, y + 2 + (cell - im.height) // 2))
        pen.multiline_text((x, y + cell + 4), "\n".join(textwrap.wrap(label, 26)[:4]), fill="black", spacing=1, font_size=9)
    sheet.save(path, optimize=True)


def sheet(path, entries, cfg_pictures, edits, edit_pictures):
    """24 pictures: the first of each category, right or wrong, and four edits as before | after."""
    pics, labels = [], []
    for cat, n in (("single", 4), ("two", 8), ("three", 2), ("ratio", 6)):
        for i in [i for i, e in enumerate(entries) if e["category"] == cat][:n]:
            pics.append(cfg_pictures[i])
            labels.append(entries[i]["prompt"])
    if edit_pictures:
        for i in range(min(4, len(edits))):
            b, c = edit_pictures[0][i], edit_pictures[1][i]
            pics.append(np.concatenate([b, np.full((256, 8, 3), 255, np.uint8), c], 1))
            labels.append("edit: " + edits[i]["prompt"])
    grid(path, pics, labels, 6)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("--out", required=True)
    p.add_argument("--prompt")
    p.add_argument("--format", default="square")
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--guidance", type=float, default=4.0)
    p.add_argument("--modes", default="cfg,instruct,edit")
    p.add_argument("--limit", type=int, default=0)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--frames", action="store_true", help="decode with the full 3-D network")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    net, rows = load(a.checkpoint, a.device)
    if a.prompt:
        from PIL import Image

        k = data.FORMATS[a.format]
        img = draw(net, rows, [rows.text_to_image("pretrain", a.prompt, k)], k, a)[0]
        Image.fromarray(img).save(os.path.join(a.out, "picture.png"))
        print(json.dumps(check.read(img), indent=1))
        return
    with open(os.path.join(T.HERE, "prompts_eval.json")) as f:
        spec = json.load(f)
    entries, edits = spec["prompts"], spec["edits"]
    if a.limit:
        entries, edits = entries[:: max(1, len(entries) // a.limit)], edits[: a.limit]
    scores, failures, cfg_pics, edit_pics = {}, {}, None, None
    with futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        if "cfg" in a.modes:
            cfg_pics = run_cfg(net, rows, entries, a, pool, scores, failures)
            scores["psnr"] = T.psnr(net.vae, a, 32 if a.limit == 0 else 2)
        if "instruct" in a.modes:
            _, cot = run_instruct(net, rows, entries, a, pool, scores, failures)
            failures["some recaptions"] = {e["prompt"]: c[:2] for e, c in list(zip(entries, cot))[::25]}
        if "edit" in a.modes:
            edit_pics = run_edit(net, rows, edits, a, pool, scores, failures)
    with open(os.path.join(a.out, "scores.json"), "w") as f:
        json.dump({"steps": a.steps, "guidance": a.guidance, "scores": scores, "failures": failures}, f, indent=1)
    print(json.dumps({"steps": a.steps, "guidance": a.guidance, **scores}))
    if cfg_pics:
        sheet(os.path.join(a.out, "samples.png"), entries, cfg_pics, edits, edit_pics)


if __name__ == "__main__":
    main()
