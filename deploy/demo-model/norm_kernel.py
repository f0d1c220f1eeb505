"""SiLU(GroupNorm(x)) for channels-last pictures as four small Triton kernels (forward and backward).

x is [B, C, H, W] in channels-last memory, seen as [B, P, C] with P = H * W. Sums over positions are
kept per channel in fp32; a group is C / groups neighbouring channels. Checked against PyTorch by
`self_check`, which also runs without a GPU under TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl



def rows_of(channels):
    """Positions per program: about 8192 values in flight."""
    return max(16, 8192 // channels)


@triton.jit
def _group(v, C: tl.constexpr, CG: tl.constexpr):
    """Sum of v [C] over each group of CG channels, spread back to the channels."""
    if CG == 1:
        return v
    s = tl.sum(tl.reshape(v, (C // CG, CG)), 1)
    return tl.reshape(tl.broadcast_to(s[:, None], (C // CG, CG)), (C,))


@triton.jit
def _moments(sums, b, n, eps, C: tl.constexpr, CG: tl.constexpr):
    c = tl.arange(0, C)
    mean = _group(tl.load(sums + b * 2 * C + c), C, CG) / n
    sq = _group(tl.load(sums + b * 2 * C + C + c), C, CG) / n
    return mean, 1.0 / tl.sqrt(tl.maximum(sq - mean * mean, 0.0) + eps)


@triton.jit
def _sum_kernel(x, sums, p, C: tl.constexpr, R: tl.constexpr, LOOP: tl.constexpr):
    b, k = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    s = tl.zeros((C,), tl.float32)
    q = tl.zeros((C,), tl.float32)
    for i in range(LOOP):
        r = (k * LOOP + i) * R + tl.arange(0, R)
        v = tl.load(x + (b * p + r[:, None]) * C + c[None, :], mask=r[:, None] < p, other=0.0).to(tl.float32)
        s += tl.sum(v, 0)
        q += tl.sum(v * v, 0)
    tl.atomic_add(sums + b * 2 * C + c, s)
    tl.atomic_add(sums + b * 2 * C + C + c, q)


@triton.jit
def _apply_kernel(x, y, sums, w, bias, p, n, eps, C: tl.constexpr, CG: tl.constexpr, R: tl.constexpr):
    b, k = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    mean, rstd = _moments(sums, b, n, eps, C, CG)
    r = k * R + tl.arange(0, R)
    at = (b * p + r[:, None]) * C + c[None, :]
    v = tl.load(x + at, mask=r[:, None] < p, other=0.0).to(tl.float32)
    z = (v - mean[None, :]) * rstd[None, :] * tl.load(w + c)[None, :] + tl.load(bias + c)[None, :]
    z = z * tl.sigmoid(z)
    tl.store(y + at, z.to(y.dtype.element_ty), mask=r[:, None] < p)


@triton.jit
def _dz(x, dy, sums, w, bias, at, ok, b, n, eps, C: tl.constexpr, CG: tl.constexpr):
    c = tl.arange(0, C)
    mean, rstd = _moments(sums, b, n, eps, C, CG)
    v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=ok, other=0.0).to(tl.float32)
    xhat = (v - mean[None, :]) * rstd[None, :]
    z = xhat * tl.load(w + c)[None, :] + tl.load(bias + c)[None, :]
    s = tl.sigmoid(z)
    return xhat, g * s * (1 + z * (1 - s)), rstd


@triton.jit
def _back_sum_kernel(x, dy, sums, grads, w, bias, p, n, eps, C: tl.constexpr, CG: tl.constexpr, R: tl.constexpr,
                     LOOP: tl.constexpr):  # fmt: skip
    b, k = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    s = tl.zeros((C,), tl.float32)
    q = tl.zeros((C,), tl.float32)
    for i in range(LOOP):
        r = (k * LOOP + i) * R + tl.arange(0, R)
        ok = (r[:, None] < p) & (c[None, :] < C)
        at = (b * p + r[:, None]) * C + c[None, :]
        xhat, dz, _ = _dz(x, dy, sums, w, bias, at, ok, b, n, eps, C, CG)
        s += tl.sum(dz, 0)
        q += tl.sum(dz * xhat, 0)
    tl.atomic_add(grads + b * 2 * C + c, s)
    tl.atomic_add(grads + b * 2 * C + C + c, q)


@triton.jit
def _back_kernel(x, dy, dx, sums, grads, w, bias, p, n, eps, C: tl.constexpr, CG: tl.constexpr, R: tl.constexpr):
    b, k = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    r = k * R + tl.arange(0, R)
    ok = (r[:, None] < p) & (c[None, :] < C)
    at = (b * p + r[:, None]) * C + c[None, :]
    xhat, dz, rstd = _dz(x, dy, sums, w, bias, at, ok, b, n, eps, C, CG)
    wt = tl.load(w + c)
    m1 = _group(wt * tl.load(grads + b * 2 * C + c), C, CG) / n
    m2 = _group(wt * tl.load(grads + b * 2 * C + C + c), C, CG) / n
    g = rstd[None, :] * (dz * wt[None, :] - m1[None, :] - xhat * m2[None, :])
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=ok)


class NormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, groups, eps):
        x = x.contiguous(memory_format=torch.channels_last)
        bsz, c, h, wd = x.shape
        p, cg = h * wd, c // groups
        n, rows = float(p * cg), rows_of(c)
        loop = max(1, min(8, p // (4 * rows)))
        sums = torch.zeros(bsz, 2, c, device=x.device, dtype=torch.float32)
        _sum_kernel[(bsz, triton.cdiv(p, rows * loop))](x, sums, p, c, rows, loop)
        y = torch.empty_like(x)
        _apply_kernel[(bsz, triton.cdiv(p, rows))](x, y, sums, w, b, p, n, eps, c, cg, rows)
        ctx.save_for_backward(x, w, b, sums)
        ctx.dims = (bsz, c, p, cg, n, rows, loop, eps)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, b, sums = ctx.saved_tensors
        bsz, c, p, cg, n, rows, loop, eps = ctx.dims
        dy = dy.contiguous(memory_format=torch.channels_last)
        grads = torch.zeros_like(sums)
        _back_sum_kernel[(bsz, triton.cdiv(p, rows * loop))](x, dy, sums, grads, w, b, p, n, eps, c, cg, rows, loop)
        dx = torch.empty_like(x)
        _back_kernel[(bsz, triton.cdiv(p, rows))](x, dy, dx, sums, grads, w, b, p, n, eps, c, cg, rows)
        total = grads.sum(0)
        return dx, total[1], total[0], None, None


def norm_silu(x, w, b, groups, eps):
    return NormSilu.apply(x, w, b, groups, eps)


def self_check(device, dtype=torch.float32, limit=2e-3):
    """Largest difference to PyTorch's own GroupNorm and SiLU, forward and gradients."""
    worst = 0.0
    for c, h, w in ((32, 16, 24), (64, 8, 8), (256, 8, 4)):
        x = torch.randn(2, c, h, w, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        wt, bs = torch.randn(c, device=device), torch.randn(c, device=device)
        up = torch.randn(2, c, h, w, device=device).to(dtype)
        a = [t.clone().requires_grad_() for t in (x, wt, bs)]
        r = [t.clone().float().requires_grad_() for t in (x, wt, bs)]
        norm_silu(*a, 32, 1e-6).backward(up)
        y = torch.nn.functional.silu(torch.nn.functional.group_norm(r[0], 32, r[1], r[2], 1e-6))
        y.backward(up.float())
        worst = max(worst, (norm_silu(*a, 32, 1e-6).float() - y).abs().max().item())
        for g, e in zip(a, r):
            worst = max(worst, ((g.grad.float() - e.grad).abs().max() / e.grad.abs().max()).item())
    if not worst < limit:
        raise RuntimeError(f"norm kernel differs from the reference by {worst:.2e}")
    return worst


if __name__ == "__main__":
    print(self_check("cuda" if torch.cuda.is_available() else "cpu"))
