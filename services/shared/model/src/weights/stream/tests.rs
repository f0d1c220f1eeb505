use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::weights::SINGLE_FILE;

/// Value `i` of tensor `t`; some are not exact in BF16.
fn value(t: usize, i: usize) -> f32 {
    (i as f32).mul_add(0.37, t as f32) * if i.is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// A checkpoint whose tensor `t<n>` has these dimensions and type.
fn write_checkpoint(dir: &Path, tensors: &[(Vec<usize>, DType)]) -> Checkpoint {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (t, (shape, dtype)) in tensors.iter().enumerate() {
        let begin = data.len();
        for i in 0..shape.iter().product() {
            match dtype {
                DType::F32 => data.extend(value(t, i).to_le_bytes()),
                DType::Bf16 => data.extend(bf16::from_f32(value(t, i)).to_le_bytes()),
            }
        }
        let name = match dtype {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
        };
        let entry =
            serde_json::json!({"dtype": name, "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(format!("t{t}"), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = File::create(dir.join(SINGLE_FILE)).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&data).unwrap();
    Checkpoint::open(dir).unwrap()
}

/// Collects the parts, and keeps up to `kept` slots for a while like copies under way do.
struct Collector {
    slots: usize,
    bytes: usize,
    kept: usize,
    flying: VecDeque<Vec<u8>>,
    back: usize,
    parts: Vec<Vec<u8>>,
    ended: Vec<usize>,
    /// Chunk at which it fails.
    fails_at: Option<usize>,
    taken: usize,
}

impl Collector {
    fn new(slots: usize, bytes: usize, kept: usize) -> Self {
        Self {
            slots,
            bytes,
            kept,
            flying: VecDeque::new(),
            back: 0,
            parts: Vec::new(),
            ended: Vec::new(),
            fails_at: None,
            taken: 0,
        }
    }
}

impl ChunkSink for Collector {
    type Slot = Vec<u8>;

    fn slots(&mut self) -> Result<Vec<Vec<u8>>, ModelError> {
        Ok(vec![vec![0xee; self.bytes]; self.slots])
    }

    fn take(&mut self, chunk: &Chunk, slot: Vec<u8>) -> Result<Option<Vec<u8>>, ModelError> {
        if self.fails_at == Some(self.taken) {
            return Err(ModelError::Internal("enough".into()));
        }
        self.taken += 1;
        self.parts
            .resize(self.parts.len().max(chunk.part + 1), Vec::new());
        assert_eq!(self.parts[chunk.part].len(), chunk.offset);
        self.parts[chunk.part].extend(&slot[..chunk.bytes]);
        if chunk.last {
            self.ended.push(chunk.part);
        }
        self.flying.push_back(slot);
        Ok((self.flying.len() > self.kept)
            .then(|| self.flying.pop_front())
            .flatten())
    }

    fn keep(&mut self, _slot: Vec<u8>) {
        self.back += 1;
    }
}

/// The part by its definition.
fn expected(part: &Part, stored: DType, t: usize) -> Vec<u8> {
    let stride: usize = part.shape.iter().skip(1).product();
    let mut out = Vec::new();
    for row in part.rows.iter().cloned().flatten() {
        for column in part.columns.clone() {
            let exact = value(t, row * stride + column);
            let held = match stored {
                DType::F32 => exact,
                DType::Bf16 => bf16::from_f32(exact).to_f32(),
            };
            match part.dtype {
                DType::F32 => out.extend(held.to_le_bytes()),
                DType::Bf16 => out.extend(bf16::from_f32(held).to_le_bytes()),
            }
        }
    }
    out
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16)]
}

fn range(end: usize) -> impl Strategy<Value = Range<usize>> {
    (0..=end, 0..=end).prop_map(|(a, b)| a.min(b)..a.max(b))
}

/// Tensors, and parts of them with the tensor that each is of.
type Case = (Vec<(Vec<usize>, DType)>, Vec<(usize, Part)>);

fn case() -> impl Strategy<Value = Case> {
    let shape = prop::collection::vec(1_usize..9, 1..4);
    let tensors = prop::collection::vec((shape, dtype()), 1..5);
    tensors.prop_flat_map(|tensors| {
        let all = tensors.clone();
        let part = (0..tensors.len()).prop_flat_map(move |t| {
            let shape = all[t].0.clone();
            let width = shape.iter().skip(1).product();
            let rows = prop::collection::vec(range(shape[0]), 0..4);
            let columns = prop_oneof![Just(0..width), range(width)];
            (rows, columns, dtype()).prop_map(move |(rows, columns, dtype)| {
                let part = Part::whole(format!("t{t}"), &shape, dtype);
                (t, part.with_rows(rows).with_columns(columns))
            })
        });
        (Just(tensors), prop::collection::vec(part, 0..8))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_parts_arrive_in_order_and_whole_through_any_ring(
        (tensors, parts) in case(),
        slots in 1_usize..5,
        kept in 0_usize..4,
        row in 0_usize..3,
        readers in 1_usize..6,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = write_checkpoint(dir.path(), &tensors);
        // From slots that hold a single row of the widest part to ones that hold everything.
        let widest = parts.iter().map(|(_, p)| p.columns.len() * width(p.dtype)).max();
        let bytes = (widest.unwrap_or(0).max(4)) << (4 * row);
        let mut sink = Collector::new(slots, bytes, kept.min(slots - 1));
        let list: Vec<Part> = parts.iter().map(|(_, part)| part.clone()).collect();
        let streamed = checkpoint.stream(&list, readers, &mut sink).unwrap();
        prop_assert_eq!(&sink.ended, &(0..parts.len()).collect::<Vec<_>>());
        let mut total = 0;
        for ((t, part), got) in parts.iter().zip(&sink.parts) {
            prop_assert_eq!(got, &expected(part, tensors[*t].1, *t));
            prop_assert_eq!(part.bytes(), got.len());
            total += got.len() as u64;
        }
        prop_assert_eq!(streamed.bytes, total);
        prop_assert_eq!(streamed.chunks, sink.taken);
        prop_assert_eq!(sink.flying.len() + sink.back, slots);
    }
}

/// Four tensors of 4 KiB in BF16.
fn four(dir: &Path) -> (Checkpoint, Vec<Part>) {
    let tensors = vec![(vec![64, 32], DType::Bf16); 4];
    let whole = |t: usize| Part::whole(format!("t{t}"), &[64, 32], DType::Bf16);
    (write_checkpoint(dir, &tensors), (0..4).map(whole).collect())
}

#[test]
fn a_file_that_became_shorter_is_named_and_nobody_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, parts) = four(dir.path());
    let path = dir.path().join(SINGLE_FILE);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let mut sink = Collector::new(2, 256, 1);
    let refused = checkpoint.stream(&parts, 4, &mut sink).unwrap_err();
    assert!(
        matches!(&refused, ModelError::CheckpointFile { file, .. } if file == SINGLE_FILE),
        "{refused}"
    );
    assert!(sink.ended.len() < 4);
}

#[test]
fn an_error_of_the_consumer_stops_the_readers_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, parts) = four(dir.path());
    let mut sink = Collector::new(3, 256, 1);
    sink.fails_at = Some(7);
    let refused = checkpoint.stream(&parts, 4, &mut sink).unwrap_err();
    assert!(matches!(&refused, ModelError::Internal(why) if why == "enough"));
    assert_eq!(sink.taken, 7);
}

#[test]
fn a_consumer_that_keeps_every_slot_is_an_error_and_no_hang() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, parts) = four(dir.path());
    for slots in [0, 2] {
        let mut sink = Collector::new(slots, 256, slots);
        let refused = checkpoint.stream(&parts, 4, &mut sink).unwrap_err();
        // Without slots no part fits into one.
        let typed = match &refused {
            ModelError::Internal(why) => slots == 2 && why.contains("slots"),
            ModelError::CheckpointTensor { tensor, .. } => slots == 0 && tensor == "t0",
            _ => false,
        };
        assert!(typed, "{slots}: {refused}");
    }
}

#[test]
fn parts_that_the_checkpoint_does_not_have_are_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, parts) = four(dir.path());
    let part = |change: fn(Part) -> Part| change(parts[1].clone());
    let row = 5..65;
    let bad = [
        part(|p| Part {
            name: "none".into(),
            ..p
        }),
        part(|p| Part {
            shape: vec![32, 64],
            ..p
        }),
        part(|p| p.with_columns(1..33)),
        part(|p| p.with_columns(0..31)).with_rows(vec![row]),
    ];
    for wrong in bad {
        let mut sink = Collector::new(2, 32, 0);
        let list = [parts[0].clone(), wrong.clone()];
        let refused = checkpoint.stream(&list, 2, &mut sink).unwrap_err();
        let named = matches!(&refused, ModelError::CheckpointTensor { tensor, .. } if *tensor == wrong.name);
        assert!(named, "{refused}");
        assert_eq!(sink.taken, 0);
    }
    let mut sink = Collector::new(2, 32, 0);
    let narrow = [part(|p| p.with_columns(0..17))];
    let refused = checkpoint.stream(&narrow, 2, &mut sink).unwrap_err();
    assert!(refused.to_string().contains("does not fit"), "{refused}");
}
