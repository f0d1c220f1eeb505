//! `omni bench attention`: how the memory of attention grows with the tokens, or its time on a GPU.
use base::clock;
use clap::Args;
use kernels::{AttnHeads, AttnRow, Segment, SegmentKind, Tensor, varlen_attention, workspace};
use serde_json::{Value, json};

use super::{bad, json as print, memory};
use crate::error::OmniError;

/// Most tokens that a measurement may ask for.
const MAX_TOKENS: usize = 1 << 20;
/// Most rows, and calls, of one on a GPU.
#[cfg(feature = "cuda")]
const MAX_ROWS: usize = 1024;

/// Measure the memory of attention at several lengths, or its time on a GPU; prints JSON.
#[derive(Debug, Args)]
pub(crate) struct AttentionArgs {
    /// Lengths to measure, in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 4096, 16_384])]
    tokens: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Key-value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Elements of one head.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Compute threads; 0: one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Measure on this GPU, by its number (builds with the feature `cuda`).
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// On a GPU: rows of each length.
    #[arg(long, default_value_t = 2)]
    rows: usize,
    /// On a GPU: cached tokens before each row.
    #[arg(long, default_value_t = 256)]
    prefix: usize,
    /// On a GPU: calls to time.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

/// Runs the measurement.
pub(crate) fn run(args: &AttentionArgs) -> Result<String, OmniError> {
    if args.tokens.is_empty() || args.tokens.iter().any(|n| !(1..=MAX_TOKENS).contains(n)) {
        return Err(bad(format!("tokens must be numbers of 1 to {MAX_TOKENS}")));
    }
    let heads = AttnHeads {
        q: args.heads,
        kv: args.kv_heads,
        dim: args.head_dim,
    };
    let legal = |n: usize| (1..=1024).contains(&n);
    if ![heads.q, heads.kv, heads.dim].into_iter().all(legal) || !heads.q.is_multiple_of(heads.kv) {
        return Err(bad(
            "heads must be a multiple of kv_heads, all of 1 to 1024",
        ));
    }
    if let Some(ordinal) = args.gpu {
        return print(&on_gpu(args, ordinal, heads)?);
    }
    crate::roles::set_threads(args.threads)?;
    let mut lengths = args.tokens.clone();
    lengths.sort_unstable();
    let sizes = lengths
        .iter()
        .map(|&tokens| measure(tokens, heads))
        .collect::<Result<Vec<_>, _>>()?;
    print(&json!({
        "bench": "attention",
        "version": crate::cli::version(),
        "heads": heads.q,
        "kv_heads": heads.kv,
        "head_dim": heads.dim,
        "threads": rayon::current_num_threads(),
        "sizes": sizes,
    }))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &AttentionArgs, _: usize, _: AttnHeads) -> Result<Value, OmniError> {
    Err(super::no_gpu())
}

#[cfg(feature = "cuda")]
fn on_gpu(args: &AttentionArgs, ordinal: usize, heads: AttnHeads) -> Result<Value, OmniError> {
    use super::gpu_ops::{AttentionCase, attention_on, gpu_error};

    if !(1..=MAX_ROWS).contains(&args.rows) || !(1..=MAX_ROWS).contains(&args.rounds) {
        return Err(bad(format!("rows and rounds must be 1 to {MAX_ROWS}")));
    }
    if args.prefix > MAX_TOKENS {
        return Err(bad(format!("prefix must be at most {MAX_TOKENS}")));
    }
    let sizes = args.tokens.iter().map(|&tokens| {
        let case = AttentionCase {
            heads,
            rows: args.rows,
            tokens,
            prefix: args.prefix,
        };
        attention_on(ordinal, case, args.rounds).map_err(gpu_error)
    });
    Ok(json!({
        "bench": "attention",
        "version": crate::cli::version(),
        "heads": heads.q,
        "kv_heads": heads.kv,
        "head_dim": heads.dim,
        "sizes": sizes.collect::<Result<Vec<_>, _>>()?,
    }))
}

/// One image of `tokens` tokens that all see each other, without a prefix.
fn measure(tokens: usize, heads: AttnHeads) -> Result<Value, OmniError> {
    let kernel = |error: kernels::KernelError| super::model_error(error.into());
    let filled = |count: usize| {
        let data = (0..tokens * count * heads.dim).map(|i| (i % 251) as f32 / 251.0 - 0.5);
        Tensor::from_f32(&[tokens, count, heads.dim], data.collect())
    };
    let q = filled(heads.q).map_err(kernel)?;
    let k = filled(heads.kv).map_err(kernel)?;
    let v = filled(heads.kv).map_err(kernel)?;
    let row = AttnRow {
        past: Vec::new(),
        fresh: 0..tokens,
    };
    let segment = Segment {
        row: 0,
        q: 0..tokens,
        kind: SegmentKind::Full,
        q_pos: 0,
        keys: tokens,
    };
    let operands = (heads.q + 2 * heads.kv) * heads.dim * tokens * size_of::<f32>();
    let before = memory::resident_bytes()?;
    workspace::reset_peak();
    let start = clock::now();
    let scale = 1.0 / (heads.dim as f32).sqrt();
    let out = varlen_attention(&q, &k, &v, &[row], &[segment], scale).map_err(kernel)?;
    let ms = clock::millis_since(start);
    let scratch = workspace::peak_bytes();
    let result = out.numel() * size_of::<f32>();
    Ok(json!({
        "tokens": tokens,
        "ms": ms,
        "gflops": 4.0 * (tokens * tokens * heads.q * heads.dim) as f64 / ms / 1e6,
        "operand_bytes": operands,
        "result_bytes": result,
        "peak_scratch_bytes": scratch,
        "peak_bytes": operands + result + scratch,
        "peak_bytes_per_token": (operands + result + scratch) as f64 / tokens as f64,
        "square_mask_bytes": tokens * tokens,
        "resident_growth_bytes": memory::resident_bytes()?.saturating_sub(before),
        "peak_resident_bytes": memory::peak_resident_bytes()?,
    }))
}
