//! Layers on their way from the thread that computes to the pool: each is told when all of its tokens are
//! there, while the next ones are computed.
//!
//! Every rank tells its heads of its layers. A layer is a layer of the row, and is published, once all ranks
//! have told theirs.
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use kv::{KvGeometry, PrefixIdentity};
use model::LayerSink;
use proto::v1::prefix_row::Kind;
use stage::{Ranks, StageError};
use tokio::sync::mpsc;

use crate::row::Row;

/// Heads of a layer, from one rank.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) layer: usize,
    pub(crate) heads: Range<usize>,
    /// `[k|v][kv_head][token][dim]` of these heads.
    pub(crate) bytes: Vec<u8>,
}

/// A row that is being computed, for whoever publishes it.
#[derive(Debug)]
pub(crate) struct BegunRow {
    pub(crate) kind: Kind,
    pub(crate) identity: PrefixIdentity,
    pub(crate) geometry: KvGeometry,
    pub(crate) tokens: usize,
    pub(crate) parts: mpsc::Receiver<Part>,
    /// Set when the row need not be computed: it lies in the pool already.
    pub(crate) found: Arc<AtomicBool>,
}

/// The end of a row's parts at the thread that computes.
#[derive(Debug)]
pub(crate) struct Stream {
    parts: mpsc::Sender<Part>,
    found: Arc<AtomicBool>,
}

/// Both ends of a row's parts.
pub(crate) fn stream(
    ranks: &Ranks,
    kind: Kind,
    (identity, tokens): (PrefixIdentity, usize),
) -> (Stream, BegunRow) {
    let geometry = ranks.info().kv;
    // Every part of a row has its place: telling one never waits.
    let (tell, parts) = mpsc::channel(geometry.layers * ranks.models().len());
    let found = Arc::new(AtomicBool::new(false));
    let stream = Stream {
        parts: tell,
        found: Arc::clone(&found),
    };
    let begun = BegunRow {
        kind,
        identity,
        geometry,
        tokens,
        parts,
        found,
    };
    (stream, begun)
}

impl Stream {
    /// The row need not be computed.
    pub(crate) fn is_found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }

    /// Has each rank tell the layers of `row`, which is to have `tokens` tokens.
    pub(crate) fn attach(
        &self,
        ranks: &Ranks,
        row: &mut Row,
        tokens: usize,
    ) -> Result<(), StageError> {
        for (model, cache) in ranks.models().iter().zip(row.caches.on_host()) {
            let shard = model.rank().kv_shard(tokens)?;
            let sink = RankSink {
                first: shard.layers.start,
                heads: shard.heads,
                parts: self.parts.clone(),
                told: AtomicUsize::new(0),
            };
            cache.send_layers(tokens, Arc::new(sink));
        }
        Ok(())
    }
}

/// One rank's end.
#[derive(Debug)]
struct RankSink {
    first: usize,
    heads: Range<usize>,
    parts: mpsc::Sender<Part>,
    /// Layers told; a pass that is repeated tells none twice.
    told: AtomicUsize,
}

impl LayerSink for RankSink {
    fn layer(&self, layer: usize, bytes: Vec<u8>) {
        let next =
            self.told
                .compare_exchange(layer, layer + 1, Ordering::AcqRel, Ordering::Acquire);
        if next.is_ok() {
            // Nobody listens any more when the row was found, or the request has ended.
            let _ = self.parts.try_send(Part {
                layer: self.first + layer,
                heads: self.heads.clone(),
                bytes,
            });
        }
    }
}

/// Puts layers together and gives them out in order.
#[derive(Debug)]
pub(crate) struct Layers {
    geometry: KvGeometry,
    tokens: usize,
    /// Layers that some ranks have told, with the heads that are there.
    open: BTreeMap<usize, (Vec<u8>, Vec<bool>)>,
    /// The next layer to give out.
    pub(crate) next: usize,
}

impl Layers {
    pub(crate) fn new(geometry: KvGeometry, tokens: usize) -> Self {
        Self {
            geometry,
            tokens,
            open: BTreeMap::new(),
            next: 0,
        }
    }

    /// Takes a part; gives the layers that are whole now and whose turn it is.
    pub(crate) fn add(&mut self, part: Part) -> Vec<Vec<u8>> {
        let heads = self.geometry.kv_heads;
        if part.layer < self.next {
            return Vec::new();
        }
        let bytes = self.geometry.prefix_bytes(self.tokens) / self.geometry.layers;
        if part.heads == (0..heads) && part.bytes.len() == bytes {
            self.open
                .insert(part.layer, (part.bytes, vec![true; heads]));
        } else {
            let (layer, there) = self
                .open
                .entry(part.layer)
                .or_insert_with(|| (vec![0; bytes], vec![false; heads]));
            let each = bytes / (2 * heads);
            let own = part.heads.len();
            for (index, from) in part.bytes.chunks_exact(each).enumerate() {
                let (half, head) = (index / own, part.heads.start + index % own);
                let to = (half * heads + head) * each;
                layer[to..to + each].copy_from_slice(from);
            }
            there[part.heads].fill(true);
        }
        let mut whole = Vec::new();
        while let Some(first) = self.open.first_entry()
            && *first.key() == self.next
            && first.get().1.iter().all(|there| *there)
        {
            whole.push(first.remove().0);
            self.next += 1;
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use kv::KvDType;

    use super::*;

    const GEOMETRY: KvGeometry = KvGeometry {
        layers: 3,
        kv_heads: 4,
        head_dim: 2,
        dtype: KvDType::F32,
    };

    /// Heads of a layer of two tokens whose bytes say where they belong.
    fn part(layer: usize, heads: Range<usize>) -> Part {
        let each = 2 * 2 * 4;
        let mut bytes = Vec::new();
        for half in 0..2 {
            for head in heads.clone() {
                bytes.extend(vec![(layer * 16 + half * 8 + head) as u8; each]);
            }
        }
        Part {
            layer,
            heads,
            bytes,
        }
    }

    #[test]
    fn a_layer_is_given_out_whole_in_its_turn_once_every_rank_has_told_it() {
        let mut layers = Layers::new(GEOMETRY, 2);
        assert!(layers.add(part(1, 0..4)).is_empty(), "not its turn");
        assert!(layers.add(part(0, 2..4)).is_empty(), "half of it");
        assert!(layers.add(part(0, 2..4)).is_empty(), "the same half");
        let whole = layers.add(part(0, 0..2));
        assert_eq!(whole, [part(0, 0..4).bytes, part(1, 0..4).bytes]);
        assert!(layers.add(part(0, 0..4)).is_empty(), "given out");
        assert_eq!(layers.add(part(2, 0..4)).len(), 1);
        assert_eq!(layers.next, 3);
    }
}
