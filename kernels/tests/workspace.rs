//! Scratch memory of attention, measured. The only test of its binary, because the counter is global.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{full, on_threads, random};
use kernels::{
    AttnHeads, AttnRow, varlen_attention, varlen_attention_partial,
    varlen_attention_workspace_bytes, workspace,
};

#[test]
fn attention_scratch_does_not_grow_with_the_tokens() {
    let mut peaks = Vec::new();
    for (heads, threads) in [
        (
            AttnHeads {
                q: 8,
                kv: 2,
                dim: 16,
            },
            2,
        ),
        (
            AttnHeads {
                q: 4,
                kv: 1,
                dim: 128,
            },
            3,
        ),
        (
            AttnHeads {
                q: 4,
                kv: 4,
                dim: 64,
            },
            8,
        ),
    ] {
        for tokens in [1, 64, 1024, 4096] {
            let [q, k] = [heads.q, heads.kv].map(|h| random(1, &[tokens, h, heads.dim]));
            let rows = [AttnRow {
                past: Vec::new(),
                fresh: 0..tokens,
            }];
            let segments = [full(0, 0..tokens, tokens)];
            let peak = |run: &(dyn Fn() + Sync)| {
                on_threads(threads, || {
                    workspace::reset_peak();
                    run();
                    workspace::peak_bytes()
                })
            };
            let whole = peak(&|| {
                varlen_attention(&q, &k, &k, &rows, &segments, 0.1).unwrap();
            });
            let partial = peak(&|| {
                varlen_attention_partial(&q, &rows, &k, &k, &segments, 0.1).unwrap();
            });
            let bound = varlen_attention_workspace_bytes(heads, threads);
            for peak in [whole, partial] {
                assert!(
                    peak > 0 && peak <= bound,
                    "{tokens} tokens: {peak} of {bound} bytes"
                );
                peaks.push(peak);
            }
            assert_eq!(workspace::live_bytes(), 0);
        }
    }
    // A score matrix of 4096 x 4096 for one head alone would take 64 MiB.
    assert!(peaks.iter().all(|&p| p < 32 << 20), "{peaks:?}");
}
