"""Procedural scenes, their captions and their drawings.

A scene is one to three flat shapes on a plain or lightly textured background. Everything that a
prompt can ask for (shape, colour, size, position, relation, background, picture format) is known
exactly, so the same description serves as training data and as ground truth for the checker.
"""

import json
import math
import os
import random

import numpy as np
import torch

SHAPES = ["circle", "square", "triangle", "star", "ring", "cross", "diamond", "heart"]
PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 50),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "pink": (250, 150, 190),
    "cyan": (60, 200, 220),
    "black": (25, 25, 25),
    "white": (245, 245, 245),
    "gray": (150, 150, 150),
}
COLOURS = list(PALETTE)
OBJECT_COLOURS = COLOURS[:10]
BACKGROUNDS = ["white", "white", "black", "gray", "yellow", "pink", "cyan", "blue", "green"]
SIZES = {"small": 20.0, "medium": 33.0, "large": 52.0}
TEXTURES = ["plain", "striped", "dotted", "gradient"]
POSITIONS = [
    "top left", "top", "top right",
    "left", "center", "right",
    "bottom left", "bottom", "bottom right",
]  # fmt: skip
RELATIONS = ["left of", "above", "inside"]  # the normalised ones: "right of" and "below" swap
# The picture formats of the demo: official bucket index for base 256 -> (height, width).
FORMATS = {"square": 16, "wide": 12, "panorama": 8, "tall": 20, "tower": 24}
MAX_OBJECTS = 3


def buckets(base=256):
    """The official resolution group: list of (height, width), index = ratio index 0..32."""
    step = base // 16
    pairs = {(base, base)}
    for swap in (False, True):
        h, w = base, base
        while not (h == 2 * base and w == base // 2):
            h, w = min(h + step, 2 * base), max(w - step, base // 2)
            pairs.add((w, h) if swap else (h, w))
    rounded = {(h // 16 * 16, w // 16 * 16) for h, w in pairs}
    return sorted(rounded, key=lambda p: p[0] / p[1])


BUCKETS = buckets()

# ------------------------------------------------------------------------------------- scenes


def _radius(rng, size, height, width):
    unit = 0.5 + 0.5 * min(height, width) / 256
    return SIZES[size] * unit * rng.uniform(0.93, 1.07)


def _split(rng, total, parts):
    cuts = [rng.random() ** 1.3 + 0.05 for _ in range(parts)]
    scale = total / sum(cuts)
    return [c * scale for c in cuts]


def _clamp(v, lo, hi):
    return (lo + hi) / 2 if lo > hi else min(max(v, lo), hi)


def _place_pair(rng, a, b, rel, height, width):
    """Sets x, y of two objects so that `a rel b`; False when they do not fit."""
    ra, rb = a["r"], b["r"]
    if rel == "inside":
        if ra > 0.45 * rb:
            return False
        b["x"] = _clamp(rng.uniform(0, width), rb + 4, width - rb - 4)
        b["y"] = _clamp(rng.uniform(0, height), rb + 4, height - rb - 4)
        a["x"] = b["x"] + rng.uniform(-0.05, 0.05) * rb
        a["y"] = b["y"] + rng.uniform(-0.05, 0.05) * rb
        return True
    main, cross = ("x", "y") if rel == "left of" else ("y", "x")
    long, short = (width, height) if rel == "left of" else (height, width)
    slack = long - 2 * ra - 2 * rb - 20
    if slack < 0 or max(ra, rb) * 2 + 8 > short:
        return False
    before, gap, _ = _split(rng, slack, 3)
    a[main] = 4 + before + ra
    b[main] = a[main] + ra + 12 + gap + rb
    reach = 0.45 * (b[main] - a[main])
    a[cross] = _clamp(rng.uniform(0, short), ra + 4, short - ra - 4)
    off = rng.uniform(-1, 1) * min(reach, 0.25 * short)
    b[cross] = _clamp(a[cross] + off, rb + 4, short - rb - 4)
    return abs(b[cross] - a[cross]) < 0.8 * (b[main] - a[main])


def _clear(c, others, height, width):
    if not (c["r"] + 3 <= c["x"] <= width - c["r"] - 3 and c["r"] + 3 <= c["y"] <= height - c["r"] - 3):
        return False
    return all(math.hypot(c["x"] - o["x"], c["y"] - o["y"]) > c["r"] + o["r"] + 8 for o in others)


def _place_third(rng, objs, height, width):
    """Places objs[2] left of / above objs[1] or the other way round; returns the triple or None."""
    c, b = objs[2], objs[1]
    for _ in range(24):
        rel = rng.choice(["left of", "above"])
        sign = rng.choice([-1, 1])
        dist = (b["r"] + c["r"] + 12) + rng.random() * 70
        off = rng.uniform(-0.5, 0.5) * dist
        dx, dy = (sign * dist, off) if rel == "left of" else (off, sign * dist)
        c["x"], c["y"] = b["x"] + dx, b["y"] + dy
        if _clear(c, objs[:2], height, width):
            return (2, rel, 1) if sign < 0 else (1, rel, 2)
    return None


def position_word(x, y, height, width):
    col = 0 if x < 0.39 * width else 2 if x > 0.61 * width else 1
    row = 0 if y < 0.39 * height else 2 if y > 0.61 * height else 1
    return POSITIONS[row * 3 + col]


def _place_single(rng, obj, height, width):
    r = obj["r"]
    obj["x"] = _clamp(rng.choice([0.22, 0.5, 0.78]) * width + rng.uniform(-0.05, 0.05) * width, r + 4, width - r - 4)
    obj["y"] = _clamp(rng.choice([0.22, 0.5, 0.78]) * height + rng.uniform(-0.05, 0.05) * height, r + 4, height - r - 4)
    return position_word(obj["x"], obj["y"], height, width)


def _objects(rng, count, rel, height, width):
    cols = rng.sample(OBJECT_COLOURS, count)
    objs = []
    for i in range(count):
        size = rng.choice(list(SIZES))
        if count == 3:
            size = rng.choice(["small", "medium"])
        if rel == "inside" and i < 2:
            size = ["small", "large"][i]
        shape = rng.choice(SHAPES)
        if rel == "inside" and i == 1:
            shape = rng.choice(["circle", "square", "diamond"])
        objs.append({"shape": shape, "colour": cols[i], "size": size, "r": _radius(rng, size, height, width)})
    return objs


def sample_scene(rng, fmt=None, count=None):
    """A random scene: dict with format, height, width, background, texture, objects, triples."""
    fmt = fmt or rng.choice(list(FORMATS))
    height, width = BUCKETS[FORMATS[fmt]]
    while True:
        n = count or rng.choices([1, 2, 3], [0.30, 0.55, 0.15])[0]
        rel = rng.choices(RELATIONS, [0.4, 0.4, 0.2])[0] if n > 1 else None
        objs = _objects(rng, n, rel, height, width)
        triples, pos = [], None
        if n == 1:
            if objs[0]["r"] * 2 + 8 > min(height, width):
                continue
            pos = _place_single(rng, objs[0], height, width)
        else:
            if not _place_pair(rng, objs[0], objs[1], rel, height, width):
                continue
            triples = [(0, rel, 1)]
            if n == 3:
                third = _place_third(rng, objs, height, width)
                if third is None:
                    continue
                triples.append(third)
        used = {o["colour"] for o in objs}
        bg = rng.choice([b for b in BACKGROUNDS if b not in used])
        tex = rng.choices(TEXTURES, [0.73, 0.09, 0.09, 0.09])[0]
        return {
            "format": fmt, "height": height, "width": width, "background": bg, "texture": tex,
            "phase": rng.random(), "objects": objs, "triples": triples, "position": pos,
        }  # fmt: skip


def keys(scene):
    """What the held-out list excludes: (object, relation, object) and (object, position)."""
    name = [f"{o['colour']} {o['shape']}" for o in scene["objects"]]
    if scene["position"] is not None:
        return {f"{name[0]} @ {scene['position']}"}
    return {f"{name[a]} {rel} {name[b]}" for a, rel, b in scene["triples"]}


def held_out(path=None):
    path = path or os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts_eval.json")
    if not os.path.exists(path):
        return frozenset()
    with open(path) as f:
        return frozenset(json.load(f)["held_out"])


# ----------------------------------------------------------------------------------- captions

SYNONYMS = {
    "circle": ["circle"] * 4 + ["disc", "disk"],
    "square": ["square"] * 5 + ["box"],
    "triangle": ["triangle"],
    "star": ["star"],
    "ring": ["ring"] * 4 + ["hoop", "donut"],
    "cross": ["cross"] * 4 + ["plus sign", "plus"],
    "diamond": ["diamond"] * 4 + ["rhombus"],
    "heart": ["heart"],
    "small": ["small"] * 3 + ["little", "tiny"],
    "medium": ["medium"] * 3 + ["medium-sized"],
    "large": ["large"] * 3 + ["big", "huge"],
    "purple": ["purple"] * 4 + ["violet"],
    "gray": ["gray", "grey"],
}
REL_WORDS = {
    "left of": ["left of", "to the left of", "on the left of", "on the left side of"],
    "right of": ["right of", "to the right of", "on the right of", "on the right side of"],
    "above": ["above", "over", "higher than", "directly above"],
    "below": ["below", "under", "beneath", "underneath"],
    "inside": ["inside", "in", "within", "inside of"],
    "around": ["around", "containing", "with", "surrounding"],
}
FLIP = {"left of": "right of", "above": "below", "inside": "around"}
FORMAT_PREFIX = {
    "square": ["a square picture of", "a square image of"],
    "wide": ["a wide picture of", "a landscape picture of", "a wide image of", "a horizontal picture of"],
    "panorama": ["a panorama of", "a panoramic picture of", "a very wide picture of", "a banner with"],
    "tall": ["a tall picture of", "a portrait picture of", "a tall image of", "a vertical picture of"],
    "tower": ["a very tall picture of", "a bookmark with", "a tower format picture of", "a very tall image of"],
}
FORMAT_SUFFIX = {
    "square": ["square format", "square picture", "square image", "1:1"],
    "wide": ["wide format", "wide", "landscape", "landscape format", "wide picture", "horizontal format"],
    "panorama": ["panorama", "panoramic", "very wide", "panorama format", "banner format"],
    "tall": ["tall format", "tall", "portrait", "portrait format", "tall picture", "vertical format"],
    "tower": ["very tall", "tower format", "very tall format", "bookmark format"],
}
POS_WORDS = {
    "center": ["in the center", "in the middle", "at the center", "centered"],
    "top": ["at the top", "near the top", "in the upper part"],
    "bottom": ["at the bottom", "near the bottom", "in the lower part"],
    "left": ["on the left", "at the left", "on the left side"],
    "right": ["on the right", "at the right", "on the right side"],
    "top left": ["in the top left corner", "at the top left", "in the upper left"],
    "top right": ["in the top right corner", "at the top right", "in the upper right"],
    "bottom left": ["in the bottom left corner", "at the bottom left", "in the lower left"],
    "bottom right": ["in the bottom right corner", "at the bottom right", "in the lower right"],
}
NUMBERS = {1: "one object", 2: "two objects", 3: "three objects"}


def _word(rng, w):
    return rng.choice(SYNONYMS[w]) if w in SYNONYMS else w


def _noun(rng, o, article=True, sized=None):
    words = [_word(rng, o["colour"]), _word(rng, o["shape"])]
    if sized if sized is not None else rng.random() < 0.5:
        words.insert(0, _word(rng, o["size"]))
    text = " ".join(words)
    if article:
        text = ("an " if text[0] in "aeiou" else "a ") + text
    return text


def _pair_text(rng, a, rel, b, sized):
    na, nb = _noun(rng, a, sized=sized), _noun(rng, b, sized=sized)
    if rel == "left of" and rng.random() < 0.12:
        return f"{na} on the left and {nb} on the right"
    if rel == "above" and rng.random() < 0.12:
        return f"{na} at the top and {nb} at the bottom"
    if rng.random() < 0.5:
        return f"{na} {rng.choice(REL_WORDS[rel])} {nb}"
    if rel != "inside" and rng.random() < 0.2:
        return f"{na}, and {nb} {rng.choice(REL_WORDS[FLIP[rel]])} it"
    return f"{nb} {rng.choice(REL_WORDS[FLIP[rel]])} {na}"


def _scene_text(rng, scene, sized, named=False):
    objs = scene["objects"]
    if len(objs) == 1:
        text = _noun(rng, objs[0], sized=sized)
        return f"{text} {rng.choice(POS_WORDS[scene['position']])}" if rng.random() < 0.6 else text
    a, rel, b = scene["triples"][0]
    if len(objs) == 2 and not named and rng.random() < 0.08:
        pair = [objs[a], objs[b]]
        rng.shuffle(pair)
        return f"{_noun(rng, pair[0], sized=sized)} and {_noun(rng, pair[1], sized=sized)}"
    text = _pair_text(rng, objs[a], rel, objs[b], sized)
    if len(objs) == 3:
        c, rel2, d = scene["triples"][1]
        third, other, word = (objs[c], objs[d], rel2) if c == 2 else (objs[d], objs[c], FLIP[rel2])
        text += rng.choice([", and ", ", plus ", " and "])
        text += f"{_noun(rng, third, sized=sized)} {rng.choice(REL_WORDS[word])} the {_noun(rng, other, article=False, sized=False)}"
    return text


def _background_text(rng, scene):
    bg, tex = _word(rng, scene["background"]), scene["texture"]
    if tex == "plain":
        tex = "plain " if rng.random() < 0.1 else ""
    else:
        tex += " "
    art = "an " if (tex + bg)[0] in "aeiou" else "a "
    return rng.choice([f" on {art}{tex}{bg} background"] * 4 + [
        f" against {art}{tex}{bg} background", f" with {art}{tex}{bg} background",
        f", {tex}{bg} background", f" on {tex}{bg}",
    ])  # fmt: skip


def typo(rng, text):
    words = text.split(" ")
    for _ in range(rng.choice([1, 1, 2])):
        i = rng.randrange(len(words))
        w = words[i]
        if len(w) < 4:
            continue
        p = rng.randrange(1, len(w) - 1)
        words[i] = rng.choice([w[:p] + w[p + 1 :], w[:p] + w[p + 1] + w[p] + w[p + 2 :], w[:p] + w[p] + w[p:]])
    return " ".join(words)


def caption(rng, scene, with_format=False, with_background=None, typos=True, named=False):
    """One paraphrase of the scene; `with_format` names the picture format in words, `named` the relation."""
    sized = rng.random() < 0.55
    text = _scene_text(rng, scene, sized, named)
    bg = rng.random() < 0.8 if with_background is None else with_background
    if bg:
        text += _background_text(rng, scene)
    if with_format:
        if rng.random() < 0.4:
            text = f"{rng.choice(FORMAT_PREFIX[scene['format']])} {text}"
        else:
            text += f", {rng.choice(FORMAT_SUFFIX[scene['format']])}"
    elif rng.random() < 0.2:
        text = f"{rng.choice(['a picture of', 'draw', 'an image of', 'please draw', 'show me', 'paint'])} {text}"
    if typos and rng.random() < 0.12:
        text = typo(rng, text)
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.15 else "")


def recaption(scene):
    """The normalised description that the AR stage learns to write."""
    objs = scene["objects"]
    name = [f"{o['size']} {o['colour']} {o['shape']}" for o in objs]
    if len(objs) == 1:
        text = f"{name[0]} at {scene['position']}"
    else:
        text = "; ".join(f"{name[a]} {rel} {name[b]}" for a, rel, b in scene["triples"])
    return f"{text}. {scene['texture']} {scene['background']} background."


def think(scene):
    objs = scene["objects"]
    order = [0] if len(objs) == 1 else list(dict.fromkeys(i for a, _, b in scene["triples"] for i in (a, b)))
    return f"{NUMBERS[len(objs)]}: " + ", ".join(f"{objs[i]['colour']} {objs[i]['shape']}" for i in order) + "."


EDIT_KINDS = ["recolour", "remove", "background"]


def sample_edit(rng, kind=None):
    """(source scene, instruction, target scene, edit record): same geometry, one thing changed."""
    while True:
        src = sample_scene(rng, "square", count=rng.choices([1, 2], [0.3, 0.7])[0])
        kind_now = kind or rng.choice(EDIT_KINDS)
        objs = src["objects"]
        i = rng.randrange(len(objs))
        if kind_now == "remove" and (len(objs) == 1 or src["triples"][0][1] == "inside" and i == 1):
            continue
        if len({o["shape"] for o in objs}) < len(objs):
            continue
        break
    dst = dict(src, objects=[dict(o) for o in objs])
    used = {o["colour"] for o in objs} | {src["background"]}
    noun = _word(rng, objs[i]["shape"])
    if rng.random() < 0.4:
        noun = f"{_word(rng, objs[i]['colour'])} {noun}"
    record = {"kind": kind_now, "object": i}
    if kind_now == "recolour":
        new = rng.choice([c for c in OBJECT_COLOURS if c not in used])
        dst["objects"][i]["colour"] = record["colour"] = new
        text = rng.choice(["make the {n} {c}", "change the {n} to {c}", "turn the {n} {c}", "paint the {n} {c}"])
    elif kind_now == "remove":
        new = ""
        del dst["objects"][i]
        dst["triples"] = []
        o = dst["objects"][0]
        dst["position"] = position_word(o["x"], o["y"], dst["height"], dst["width"])
        text = rng.choice(["remove the {n}", "delete the {n}", "take away the {n}", "erase the {n}"])
    else:
        new = rng.choice([c for c in set(BACKGROUNDS) if c not in used])
        dst["background"] = record["colour"] = new
        text = rng.choice(["make the background {c}", "change the background to {c}", "turn the background {c}"])
    text = text.format(n=noun, c=_word(rng, new) if new else "")
    return src, text + ("." if rng.random() < 0.15 else ""), dst, record


# ----------------------------------------------------------------------------------- drawing

SCENE_FLOATS = 3 + 5 * MAX_OBJECTS


def scene_vector(scene):
    """Flat numbers for the renderer: background, texture, phase, then shape (-1: none), colour, x, y, r."""
    v = [COLOURS.index(scene["background"]), TEXTURES.index(scene["texture"]), scene["phase"]]
    # containers first, so that what is inside is drawn on top
    for o in sorted(scene["objects"], key=lambda o: -o["r"]):
        v += [SHAPES.index(o["shape"]), COLOURS.index(o["colour"]), o["x"], o["y"], o["r"]]
    return v + [-1.0, 0, 0, 0, 1] * (MAX_OBJECTS - len(scene["objects"]))


def _polygon(points):
    return [(float(x), float(y)) for x, y in points]


_STAR = _polygon([
    (1.12 * (1 if k % 2 == 0 else 0.45) * math.sin(math.pi * k / 5), -1.12 * (1 if k % 2 == 0 else 0.45) * math.cos(math.pi * k / 5))
    for k in range(10)
])  # fmt: skip
_TRIANGLE = _polygon([(0.0, -1.05), (1.05, 0.85), (-1.05, 0.85)])


def _sd_polygon(x, y, points):
    """Exact signed distance to a closed polygon (negative inside)."""
    best, parity = None, None
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1]):
        ex, ey = bx - ax, by - ay
        t = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey)).clamp(0, 1)
        d = (x - ax - t * ex) ** 2 + (y - ay - t * ey) ** 2
        cross = ((ay > y) != (by > y)) & (x < (bx - ax) * (y - ay) / (by - ay + 1e-12) + ax)
        best = d if best is None else torch.minimum(best, d)
        parity = cross if parity is None else parity ^ cross
    return torch.where(parity, -best.sqrt(), best.sqrt())


def _sd_shape(x, y, shape):
    """Signed distance in units of the radius for local coordinates x right, y down."""
    if shape == "circle":
        return torch.hypot(x, y) - 1
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.9
    if shape == "triangle":
        return _sd_polygon(x, y, _TRIANGLE)
    if shape == "star":
        return _sd_polygon(x, y, _STAR)
    if shape == "ring":
        return (torch.hypot(x, y) - 0.77).abs() - 0.25
    if shape == "cross":
        a, b = x.abs(), y.abs()
        return torch.minimum(torch.maximum(a - 1, b - 0.34), torch.maximum(a - 0.34, b - 1))
    if shape == "diamond":
        return (x.abs() * 1.25 + y.abs() - 1.08) * 0.62
    # heart: two discs over a point
    a, yy = x.abs(), y + 0.05
    disc = torch.hypot(a - 0.46, yy + 0.33) - 0.56
    wedge = torch.maximum(a * 0.735 + yy * 0.678 - 0.674, 0.05 - yy)  # the side is tangent to the disc
    inner = torch.maximum(a - 0.46, (yy + 0.25).abs() - 0.37)
    return torch.minimum(torch.minimum(disc, wedge), inner)


def _background(vec, colours, gx, gy):
    base = colours[vec[:, 0].long()]  # [B, 3]
    dark = base.mean(1, keepdim=True) < 60
    tint = torch.where(dark, base + 28, base * 0.90)
    tex, phase = vec[:, 1].long()[:, None, None], vec[:, 2][:, None, None]
    stripes = (((gx + gy) / 32 + phase).frac() - 0.5).abs() * 32 - 8
    cx, cy = ((gx / 32 + phase).frac() - 0.5) * 32, ((gy / 32 + phase).frac() - 0.5) * 32
    dots = 7 - torch.hypot(cx, cy)
    soft = torch.where(tex == 1, stripes, dots)
    amount = (soft + 0.5).clamp(0, 1)
    ramp = (gy / gy.max().clamp(min=1)).expand_as(amount)
    amount = torch.where(tex == 3, ramp, torch.where(tex == 0, torch.zeros_like(amount), amount))
    return base[:, :, None, None] + amount[:, None] * (tint - base)[:, :, None, None]


def render(vec, height, width):
    """Draws scenes: vec [B, SCENE_FLOATS] -> float pixels [B, 3, height, width] in [0, 255]."""
    dev = vec.device
    colours = torch.tensor(list(PALETTE.values()), dtype=torch.float32, device=dev)
    gy = (torch.arange(height, device=dev) + 0.5)[None, :, None]
    gx = (torch.arange(width, device=dev) + 0.5)[None, None, :]
    img = _background(vec, colours, gx, gy)
    for k in range(MAX_OBJECTS):
        o = vec[:, 3 + 5 * k : 8 + 5 * k]
        for s, name in enumerate(SHAPES):
            rows = (o[:, 0] == s).nonzero()[:, 0]
            if rows.numel() == 0:
                continue
            p = o[rows]
            r = p[:, 4][:, None, None]
            x, y = (gx - p[:, 2][:, None, None]) / r, (gy - p[:, 3][:, None, None]) / r
            cover = (0.5 - _sd_shape(x, y, name) * r).clamp(0, 1)[:, None]
            col = colours[p[:, 1].long()][:, :, None, None]
            img[rows] = img[rows] * (1 - cover) + cover * col
    return img


def draw(scenes):
    """Ground-truth pictures of scenes of one format as uint8 [B, H, W, 3] (CPU)."""
    vec = torch.tensor([scene_vector(s) for s in scenes], dtype=torch.float32)
    img = render(vec, scenes[0]["height"], scenes[0]["width"])
    return img.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


# ------------------------------------------------------------------- token rows for training

TEXT_SLOTS = 96
DROP, TEACH, RATIO = 1, 2, 4  # per-token flags: prompt body, AR target, ratio target


class Rows:
    """Builds the official token layouts (without the image span) as padded training rows."""

    def __init__(self, tokenizer):
        self.tk = tokenizer
        self.cache = {}
        self.pad = tokenizer.token_to_id("<pad>")

    def ids(self, text):
        hit = self.cache.get(text)
        if hit is None:
            hit = self.tk.encode(text, add_special_tokens=False).ids
            if len(text) < 40:
                self.cache[text] = hit
        return hit

    def special(self, name):
        return self.tk.token_to_id(name)

    def ratio(self, k):
        return self.special(f"<img_ratio_{k}>")

    def text_to_image(self, template, prompt, k, think_text=None, recaption_text=None, ratio_flag=0):
        """Ids and flags of [<bos> .. <timestep>]; sections are tokenised one by one."""
        out = [(self.special("<|startoftext|>"), 0)]

        def text(s, flag):
            out.extend((i, flag) for i in self.ids(s))

        instruct = template == "instruct"
        if instruct:
            text("User: ", 0)
        text(prompt, DROP)
        if instruct:
            text("\n\n", 0)
            text("Assistant: ", 0)
        for tag, body in (("think", think_text), ("recaption", recaption_text)):
            if body is not None:
                out.append((self.special(f"<{tag}>"), 0))
                text(body, DROP | TEACH)
                out.append((self.special(f"</{tag}>"), TEACH))
        if instruct:
            out.append((self.special("<answer>"), 0))
        for name, flag in (("<boi>", 0), ("<img_size_256>", 0), (f"<img_ratio_{k}>", ratio_flag), ("<timestep>", 0)):
            out.append((self.special(name), flag))
        return out


def _training_text(rng, rows, scene):
    k = FORMATS[scene["format"]]
    worded = rng.random() < 0.45
    # an unworded square picture teaches the default ratio; an unworded other size was asked for by number
    flag = RATIO if worded or scene["format"] == "square" else 0
    prompt = caption(rng, scene, with_format=worded)
    kind = rng.random()
    if kind < 0.45:
        return rows.text_to_image("pretrain", prompt, k, ratio_flag=flag)
    if kind < 0.60:
        return rows.text_to_image("instruct", prompt, k, ratio_flag=flag)
    if kind < 0.78:
        return rows.text_to_image("instruct", prompt, k, recaption_text=recaption(scene), ratio_flag=flag)
    return rows.text_to_image("instruct", prompt, k, think(scene), recaption(scene), ratio_flag=flag)


def _pack(seqs, pad, slots):
    ids = np.full((len(seqs), slots), pad, np.int16)
    flags = np.zeros((len(seqs), slots), np.uint8)
    lens = np.zeros(len(seqs), np.int16)
    for i, s in enumerate(seqs):
        ids[i, : len(s)] = [a for a, _ in s]
        flags[i, : len(s)] = [b for _, b in s]
        lens[i] = len(s)
    return ids, flags, lens


def t2i_chunk(seed, size, fmt, tokenizer, banned, variants=3):
    """`size` scenes of one format: vectors [n, F], ids/flags [n * variants, slots], lengths."""
    rng = random.Random(seed)
    rows = Rows(tokenizer)
    vecs, seqs = [], []
    while len(vecs) < size:
        scene = sample_scene(rng, fmt)
        if keys(scene) & banned:
            continue
        texts = [_training_text(rng, rows, scene) for _ in range(variants)]
        if max(map(len, texts)) > TEXT_SLOTS:
            continue
        vecs.append(scene_vector(scene))
        seqs += texts
    return np.asarray(vecs, np.float32), *_pack(seqs, rows.pad, TEXT_SLOTS)


EDIT_PRE, EDIT_TEXT = 8, 40


def edit_sections(rows, template, instruction, k=16):
    """(before the cond image's VAE tokens, after its <eoi>) as (id, flag) lists."""
    pre = [(rows.special("<|startoftext|>"), 0)]
    post = []
    if template == "instruct":
        pre += [(i, 0) for i in rows.ids("User: ")]
    pre += [(rows.special(n), 0) for n in ("<boi>", "<img_size_256>", f"<img_ratio_{k}>", "<timestep>")]
    post += [(i, DROP) for i in rows.ids(instruction)]
    if template == "instruct":
        post += [(i, 0) for i in rows.ids("\n\n") + rows.ids("Assistant: ")]
        post.append((rows.special("<answer>"), 0))
    post += [(rows.special(n), 0) for n in ("<boi>", "<img_size_256>", f"<img_ratio_{k}>", "<timestep>")]
    return pre, post


def edit_chunk(seed, size, tokenizer, banned):
    rng = random.Random(seed)
    rows = Rows(tokenizer)
    src, dst, pre, post = [], [], [], []
    while len(src) < size:
        a, text, b, _ = sample_edit(rng)
        if keys(a) & banned:
            continue
        p, q = edit_sections(rows, rng.choice(["pretrain", "instruct"]), text)
        if len(p) > EDIT_PRE or len(q) > EDIT_TEXT:
            continue
        src.append(scene_vector(a))
        dst.append(scene_vector(b))
        pre.append(p)
        post.append(q)
    vec = np.concatenate([np.asarray(src, np.float32), np.asarray(dst, np.float32)], 1)
    return vec, *_pack(pre, rows.pad, EDIT_PRE), *_pack(post, rows.pad, EDIT_TEXT)


def scene_chunk(seed, size, fmt):
    rng = random.Random(seed)
    return np.asarray([scene_vector(sample_scene(rng, fmt)) for _ in range(size)], np.float32)
