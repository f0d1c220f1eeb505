"""Optimisers of the demo model: orthogonalised momentum for matrices, AdamW for the rest."""

import torch

import model as M


def orthogonalise(g):
    """Newton-Schulz iteration towards the nearest orthogonal matrix, batched [N, r, c]."""
    x = g.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        m = x @ x.mT
        x = 3.4445 * x + (-4.7750 * m + 2.0315 * m @ m) @ x
    return (x.mT if flip else x).float()


class Muon:
    """Momentum with orthogonalised updates for the backbone's matrices; experts count one by one."""

    def __init__(self, net, lr):
        self.lr, self.groups = lr, []
        layers = net.model.layers
        e = layers[0].mlp.e + 1
        self.groups.append(([l.self_attn.qkv_proj.weight for l in layers], lambda p: p[None], lambda p: p[0]))
        self.groups.append(([l.self_attn.o_proj.weight for l in layers], lambda p: p[None], lambda p: p[0]))
        self.groups.append(([l.mlp.w_in for l in layers], lambda p: p.view(e, -1, p.shape[1]),
                            lambda p: p.reshape(-1, p.shape[2])))  # fmt: skip
        self.groups.append(([l.mlp.w_out for l in layers],
                            lambda p: p.view(p.shape[0], e, -1).transpose(0, 1),
                            lambda p: p.transpose(0, 1).reshape(p.shape[1], -1)))  # fmt: skip
        self.state = [[torch.zeros_like(p) for p in g[0]] for g in self.groups]

    def params(self):
        return [p for g in self.groups for p in g[0]]

    @torch.no_grad()
    def step(self, lr, momentum=0.95):
        for (ps, split, join), bufs in zip(self.groups, self.state):
            grads = [p.grad for p in ps]
            torch._foreach_lerp_(bufs, grads, 1 - momentum)
            torch._foreach_lerp_(grads, bufs, momentum)  # Nesterov
            parts = [split(g) for g in grads]
            count = parts[0].shape[0]
            o = orthogonalise(torch.cat(parts))
            scale = 0.2 * max(o.shape[1:]) ** 0.5
            torch._foreach_mul_(ps, 1 - 0.02 * lr)
            torch._foreach_add_(ps, [join(x) for x in o.split(count)], alpha=-lr * scale)


def make_optimisers(net, a):
    train = [p for n, p in net.named_parameters() if not n.startswith("vae.")]
    muon = Muon(net, a.lr) if a.muon else None
    taken = {id(p) for p in muon.params()} if muon else set()
    rest = [p for p in train if id(p) not in taken]
    adam = torch.optim.AdamW(rest, lr=a.lr, betas=(0.9, 0.97), weight_decay=0.01, fused=a.device == "cuda")
    return train, adam, muon


def lr_factor(step, done):
    warm = min(1.0, (step + 1) / 200)
    return warm * (1.0 if done < 0.45 else max(0.01, (1 - done) / 0.55))


class VaeOptimiser:
    """Orthogonalised momentum for the 3x3 convolutions between features, AdamW for the rest."""

    def __init__(self, vae, a):
        convs = [m for m in vae.modules() if isinstance(m, M.Conv)]
        for m in convs:
            m.flatten()
        edge = {id(vae.encoder.conv_in), id(vae.decoder.conv_out), id(vae.decoder.conv_in), id(vae.encoder.conv_out)}
        mats = [m.flat for m in convs if a.muon and m.kernel_size[0] == 3 and id(m) not in edge]
        self.params = [p for p in vae.parameters() if p.requires_grad]
        taken = {id(p) for p in mats}
        rest = [p for p in self.params if id(p) not in taken]
        self.adam = torch.optim.AdamW(rest, lr=a.vae_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=a.device == "cuda")
        shapes = {}
        for p in mats:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, [torch.zeros_like(p) for p in ps]) for ps in shapes.values()]

    @torch.no_grad()
    def step(self, lr, muon_lr):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for g in self.adam.param_groups:
            g["lr"] = lr
        self.adam.step()
        for ps, bufs in self.groups:
            grads = [p.grad for p in ps]
            torch._foreach_lerp_(bufs, grads, 0.05)
            torch._foreach_lerp_(grads, bufs, 0.95)
            o = orthogonalise(torch.stack(grads).flatten(2))
            o = o.mul_(0.2 * max(o.shape[1:]) ** 0.5).view(-1, *ps[0].shape)
            torch._foreach_add_(ps, list(o.unbind()), alpha=-muon_lr)
        for p in self.params:
            p.grad = None
